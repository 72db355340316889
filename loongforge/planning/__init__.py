"""``loongforge plan``: memory and time of one output layer before it runs; read :mod:`loongforge.planning.predict`."""
