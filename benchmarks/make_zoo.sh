#!/usr/bin/env bash
# Train and export the models of zoo/, and the plain transformers measured beside them.
#
#   benchmarks/make_zoo.sh DATA MINILM [RUNS]
#
# DATA holds tinyshakespeare/input.txt, imdb/{train,test}.jsonl.xz, ag_news/*.csv.gz and mnist/; the
# data of `logic` is made on the spot. MINILM is the folder of all-MiniLM-L6-v2, as the Hub has it.
# Every training uses one thread, those of `sentiment` and `topics` two; killed at any moment, the
# same command goes on from its checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=$1
minilm=$2
runs=${3:-runs}
discrete=(--set model.depth=discrete --set optim.transport=0
    --set steps.schedule=fixed --set steps.full=1 --set 'steps.short=[1]')

# The first 128 and the last 384 tokens of a review.
reviews=(--max-tokens 512 --set data.head=128 --set data.tail=384 --set run.threads=2
    --set optim.token_dropout=0.1)

stepdial train shakespeare --data "$data/tinyshakespeare/input.txt" --out "$runs/shakespeare"
stepdial convert "$minilm" --recipe sentiment --data "$data/imdb" --out "$runs/sentiment" \
    --rank 44 --teacher-epochs 2 --epochs 2 "${reviews[@]}"
stepdial convert "$minilm" --recipe topics --data "$data/ag_news" --out "$runs/topics" \
    --rank 44 --max-tokens 80 --teacher-epochs 3 --epochs 3 --set run.threads=2
stepdial train mnist-any --data "$data/mnist" --out "$runs/digits"
stepdial train logic --out "$runs/logic" \
    --set steps.schedule=fixed --set optim.iterations=3500

# Beside `logic`, with as many parameters and with four times as many.
stepdial train logic-discrete --out "$runs/logic-plain1"
stepdial train logic-discrete --out "$runs/logic-plain4" --set model.layers=4

# As many velocity evaluations, so the same training time, for the language model; for the
# classifiers two layers of the same encoder, with the same teacher and as many iterations.
stepdial train shakespeare --data "$data/tinyshakespeare/input.txt" \
    --out "$runs/shakespeare-discrete" "${discrete[@]}" --set optim.iterations=9800
stepdial train mnist-any --data "$data/mnist" --out "$runs/digits-discrete" "${discrete[@]}"
stepdial convert "$minilm" --recipe sentiment --data "$data/imdb" --out "$runs/sentiment-discrete" \
    --steps 1 --epochs 2 "${reviews[@]}" --teacher "$runs/sentiment/teacher"
stepdial convert "$minilm" --recipe topics --data "$data/ag_news" --out "$runs/topics-discrete" \
    --max-tokens 80 --steps 1 --epochs 3 --set run.threads=2 --teacher "$runs/topics/teacher"

for model in shakespeare digits; do
    stepdial export "$runs/$model" --out "zoo/$model" --steps 1,2,4,8 \
        --card "benchmarks/cards/$model.json"
done
for model in topics sentiment; do
    stepdial export "$runs/$model" --out "zoo/$model" --steps 1,2,3 --precision int8 \
        --card "benchmarks/cards/$model.json"
done
# Trained to 8 steps: what 16 do is measured as well.
stepdial export "$runs/logic" --out zoo/logic --steps 1,2,4,8,16 --card benchmarks/cards/logic.json
