"""On the import path of a server on CPU, this folder gives it the stand-in ``sgl_kernel``."""
