"""Every SGLang feature that meets --enable-treewy, in a few calls: `python tests/server/matrix --help`.

* :mod:`.scenarios`  which servers are started, what each is asked, and what must come out
* :mod:`.loads`      what a running server is asked; returns plain data
* :mod:`.verdicts`   what the data of one or two servers shows; pure functions
* :mod:`.runner`     starts servers side by side, keeps data for a later call, prints a table
"""
