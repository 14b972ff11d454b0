"""Check hosts and storage before a training, for `holdfast doctor`."""
