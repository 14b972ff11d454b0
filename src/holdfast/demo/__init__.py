"""`holdfast demo`: trains, kills, resumes, and proves that nothing of the training was lost.

`main.run_demo` is the whole demonstration; `train` is the training process, written as a user of
Holdfast would write it. JAX, Optax, Grain and Matplotlib are imported here, and only by the modules
that need them, so that `holdfast.demo.main` starts without.
"""
