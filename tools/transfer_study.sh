#!/bin/sh
# Trains a softmax teacher on Imagenette and transfers it to several mixers: the table of docs/transfer.md.
#
#     tools/transfer_study.sh imagenette runs/study      # the folder with train/ and val/, and one for the results
#
# An epoch of the 9,469 images is 148 steps. An interrupted study continues if it is started again. PYTHON selects the
# interpreter; EPOCHS and STEPS, the epochs of the teacher and the steps of an epoch of the students, make a shorter
# trial. Windows and landmarks are smaller than by default, because the grid has 8 x 8 tokens.
set -eu
data=$1 out=$2 steps=${STEPS:-148}
vitzoo() { "${PYTHON:-python}" -m vitzoo "$@"; }

vitzoo train --data-dir "$data" --output "$out/teacher" --resume auto --model vit_tiny_patch16_224 \
    --model-kwargs depth=6 embed_dim=192 num_heads=3 patch_size=8 --img-size 64 --crop-pct 1 \
    --epochs "${EPOCHS:-20}" --batch-size 64 --lr 1e-3 --warmup-epochs 2 --mixup 0.2 --workers 1
# a stopped training ends without an error
test -f "$out/teacher/model.safetensors"

transfer() { vitzoo transfer "$out/teacher" --data-dir "$data" --resume --steps $((steps / 2)) --batch-size 64 \
    --eval-images 256 --evals 8 --workers 1 --sizes 64 128 256 "$@"; }
kwargs='ls.window_size=4 longformer.window_size=2 nystrom.num_landmarks=16'
more='bigbird.block_size=2 local.block_size=4 local.memory_halo=1 neighborhood.kernel_size=3 agent.num_cells=4'
for epochs in 1 2; do
    # shellcheck disable=SC2086  the arguments are words
    transfer --mixer ls,longformer,bigbird,local,neighborhood,nystrom,linear,hedgehog,performer,agent,xca,aft_simple,pool \
        --mixer-kwargs $kwargs $more --network-steps $((steps * epochs)) --no-random-control --output "$out/epochs-$epochs"
done
# two softmax blocks, and the control from random weights
# shellcheck disable=SC2086
transfer --mixer ls,longformer,nystrom,linear,performer --mixer-kwargs $kwargs --network-steps $((steps * 2)) \
    --keep-softmax 2 --output "$out/hybrid"
"${PYTHON:-python}" "$(dirname "$0")/docs_transfer.py" "$out/epochs-1/transfer.json" "$out/epochs-2/transfer.json" \
    "$out/hybrid/transfer.json"
