#!/bin/sh
# Trains a softmax teacher on Imagenette and transfers it to every mixer: the table of docs/transfer.md.
#
#     tools/transfer_study.sh imagenette runs/study      # the folder with train/ and val/, and one for the results
#
# 9,469 images: 148 steps are an epoch. An interrupted study continues if it is started again. PYTHON selects the
# interpreter.
set -eu
data=$1 out=$2
vitzoo() { "${PYTHON:-python}" -m vitzoo "$@"; }

vitzoo train --data-dir "$data" --output "$out/teacher" --resume auto --model vit_tiny_patch16_224 \
    --model-kwargs depth=6 embed_dim=192 num_heads=3 patch_size=8 --img-size 64 --crop-pct 1 \
    --epochs 20 --batch-size 64 --lr 1e-3 --warmup-epochs 2 --mixup 0.2 --workers 1

mixers=$("${PYTHON:-python}" -c 'import vitzoo; print(",".join(m for m in vitzoo.list_mixers() if m != "softmax"))')
for epochs in 1 2; do
    vitzoo transfer "$out/teacher" --mixer "$mixers" --data-dir "$data" --output "$out/epochs-$epochs" --resume \
        --steps 74 --network-steps $((148 * epochs)) --batch-size 64 --eval-images 256 --evals 8 --workers 1 \
        --no-random-control --sizes 64 128 256
done
# two softmax blocks, and the control from random weights, for the mixers that the page is about
vitzoo transfer "$out/teacher" --mixer ls,longformer,nystrom,linear,performer --data-dir "$data" --output "$out/hybrid" \
    --resume --steps 74 --network-steps 296 --keep-softmax 2 --batch-size 64 --eval-images 256 --evals 8 --workers 1 \
    --sizes 64 128 256
"${PYTHON:-python}" "$(dirname "$0")/docs_transfer.py" "$out/epochs-1/transfer.json" "$out/epochs-2/transfer.json" \
    "$out/hybrid/transfer.json"
