"""Frameworks' trees and arrays to specs and host buffers, and back.

`import jax` and `import torch` stand here and nowhere else in the library.
"""
