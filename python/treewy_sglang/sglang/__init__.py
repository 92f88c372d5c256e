"""The glue between SGLang and TreeWY: what the patches call. A patch adds a seam; the logic is here.

* :mod:`.config`   refuses at start what TreeWY cannot serve
* :mod:`.sizing`   splits the memory budget between state slots and stash rows
* :mod:`.pool`     the state pool that holds the stash instead of snapshots
* :mod:`.backend`  target verify and commit through the operators
* :mod:`.startup`  the proof at start that TreeWY is what runs
* :mod:`.status`   counts, operator errors, /server_info
* :mod:`.float32`  comparisons in float32 on CUDA, where SGLang's kernels take none
* :mod:`.after_import`  how modules of SGLang are changed without a patch
* :mod:`.cpu`      SGLang on a machine without GPU

Importing this package imports neither torch nor SGLang.
"""
