"""Train the demo checkpoint: a byte-level Qwen3-Next hybrid whose drafts are accepted. See README.md beside this file.

* :mod:`.data`      collects the text from the Python that runs it
* :mod:`.model`     the hybrid and its MTP layer in torch, and the checkpoint files
* :mod:`.train`     trains and exports
* :mod:`.evaluate`  counts accepted drafts on held-out text
"""
