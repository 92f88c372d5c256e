"""A small checkpoint, a server on it, and the comparison that `make demo` prints. Imports nothing heavy by itself.

* :mod:`.checkpoint`  makes a small seeded Qwen3-Next; a trained one lies in `trained/` where the repository holds it
* :mod:`.server`      starts, watches, asks and stops one SGLang server
* :mod:`.prompts`     what is asked
* :mod:`.command`     `treewy demo` and `treewy serve`, also as `python -m treewy_sglang.demo run` and `serve`
"""
