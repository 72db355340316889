"""Other libraries' models with our loss; each module needs its library, named by an extra."""
