#!/usr/bin/env bash
# The run behind eval/results: SmolLM2-135M, fp32, one thread, every scheme of ours without a window, so that all behind
# the sinks is quantized, as transformers' cache does with a prompt. Half an hour of one core; the report is one more line.
#   bash eval/smollm2.sh build/smollm2 && hf-kvquant eval-report build/smollm2 --output eval/results/smollm2
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

evaluate() { # name, then model arguments
  local name=$1
  shift
  hf-kvquant eval --tasks kvq_niah_multikey --metadata max_seq_lengths=512 samples_per_cell=8 \
    --model_args "$@" --log_samples --output_path "$out/$name-512"
  hf-kvquant eval --tasks kvq_niah_multikey kvq_perplexity --metadata max_seq_lengths=1024 samples_per_cell=3 \
    --model_args "$@" --log_samples --output_path "$out/$name-1024"
}

evaluate none kv_cache=none
evaluate k4v4 kv_cache=k4v4 residual_length=0
evaluate k3v3 kv_cache=eval/schemes/k3v3.json residual_length=0
evaluate k2v2 kv_cache=k2v2 residual_length=0
evaluate tok3 kv_cache=eval/schemes/tok3.json residual_length=0
evaluate cm3 kv_cache=cm3 residual_length=0
evaluate quanto4 kv_cache=transformers:quanto4
evaluate cm4 kv_cache=cm4 residual_length=0
evaluate cm2 kv_cache=cm2 residual_length=0
evaluate cr4 kv_cache=cr4 residual_length=0
