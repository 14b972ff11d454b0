"""The launcher of `holdfast run --nproc`: ranks and spares, which outlive the loss of ranks."""
