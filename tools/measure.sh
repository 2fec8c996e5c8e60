#!/bin/sh
# Appends to weights/benchmarks.csv the measurements shown in docs/performance.md and docs/targets.md, and writes
# docs/mixers_time.png and docs/mixers_memory.png. The mixers alone take 27 minutes on 2 idle cores. Needs the packages of
# `pip install 'vitzoo-models[bench]'`. Run `make docs` afterwards. PYTHON selects the interpreter.
set -eu
cd "$(dirname "$0")/.."

bench() {
    echo "vitzoo bench $*"
    "${PYTHON:-python}" -m vitzoo bench "$@"
}

bench startup --min-rounds 9
bench models vil_ls_medium --img-size 224 384 --batch 4 --what forward 'training step' --seconds 3
bench models deit_softmax_small --against deit_small_patch16_224 --what forward 'training step' --seconds 10
bench models cvt_ls_13 cvt_performer_13 cvt_nystrom_13 cvt_aft_conv_13 \
    vil_ls_small vil_performer_small vil_nystrom_small vil_aft_conv_small \
    deit_ls_small deit_performer_small deit_nystrom_small deit_aft_conv_small \
    aft_ls_small aft_performer_small aft_nystrom_small aft_conv_small \
    --dtype float32 bfloat16 --batch 4 --what forward --seconds 0.8
bench memory
bench memory --models deit_softmax_small deit_aft_conv_small deit_aft_local_small deit_aft_simple_small \
    deit_agent_small deit_bigbird_small deit_cosformer_small deit_flowformer_small \
    deit_focused_small deit_gated_linear_small deit_global_small deit_hedgehog_small \
    deit_hydra_small deit_inline_small deit_linear_small deit_linformer_small deit_local_small \
    deit_longformer_small deit_ls_small deit_mala_small deit_mhla_small deit_neighborhood_small \
    deit_nystrom_small deit_performer_small deit_polaformer_small deit_pool_small \
    deit_reformer_small deit_relu_linear_small deit_rfa_small deit_set_small deit_swin_small \
    deit_ttt_small deit_vssd_small deit_xca_small \
    --img-size 1024 --batch 2
bench peers --seconds 0.7 --min-rounds 7
bench mixers --tokens 196 784 1024 4096 16384 --seconds 0.3 --max-seconds 5 --plots docs/mixers
