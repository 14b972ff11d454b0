"""The demonstration `holdfast demo`: train, kill, resume, and prove that no training was lost.

`main.run_demo` runs the whole demonstration. `train` is the training process, written as a user of
Holdfast would write it, with JAX or PyTorch (`learner`). Only the modules that need a framework,
Grain or Matplotlib import them, so `holdfast.demo.main` starts without them.

See docs/decisions/0050.
"""
