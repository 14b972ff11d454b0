#!/bin/bash
# Start a training on this node, and on each other node the same line: torchrun starts its processes.
#
#   TRAIN=train.py RENDEZVOUS=first-node:29400 HOLDFAST_INTERFACE=ib0 ./train.sh
#
# RENDEZVOUS is a node of the job and a free port, NODES a number or a range of nodes, such as 1:2.

# Restarted processes would read the addresses of those before, and hang (gloo, PyTorch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun starts failed processes again. holdfast run does the same with torchrun, which fails with
# the node of RENDEZVOUS; it waits until all saves are durable, and ends with 75 if preempted.
exec holdfast run --max-restarts=100 --preempted-code=75 -- \
    torchrun --nnodes="${NODES:-2}" --nproc-per-node="${PROCESSES:-1}" --max-restarts=100 \
    --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" --rdzv-id="${JOB:-train}" "$TRAIN"
