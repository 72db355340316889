#!/usr/bin/env bash
# usage: scripts/train.sh [TEXT_FILE]
# Installs, turns text into tokens, trains a small GPT for about two minutes on two CPU cores, and then runs the same
# 20 steps with the fused and with the plain output layer.  Without TEXT_FILE the text is Python's own documentation.
set -euo pipefail
text=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."

bash scripts/install.sh train
loongforge=.venv/bin/loongforge
data=data/demo
run=runs/demo
mkdir -p "$data"
rm -rf "$run"

if [ -z "$text" ]; then
    text=$data/python_topics.txt
    .venv/bin/python -c 'from pydoc_data.topics import topics; print("\n\n".join(topics.values()))' >"$text"
fi

echo "== tokens"
"$loongforge" preprocess --input "$text" --output-prefix "$data/text" --tokenizer bpe --vocab-size 8192

echo "== training; curves: .venv/bin/tensorboard --logdir $run/tensorboard"
"$loongforge" train --config configs/tiny.yaml --data-path "$data/text" \
    --save "$run/checkpoints" --tensorboard-dir "$run/tensorboard"

echo "== the same 20 steps, fused and unfused"
# torch's profiler announces itself on stderr.
"$loongforge" train --config configs/tiny.yaml --data-path "$data/text" --compare-unfused 20 \
    2> >(grep -v -e '^USDT:' -e 'CPUAllocator.cpp' >&2)
