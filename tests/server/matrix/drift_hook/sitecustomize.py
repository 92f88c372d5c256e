"""Python imports this by itself in every process that has the folder on PYTHONPATH: the servers of drift.py."""

import os

if os.environ.get("MATRIX_DRIFT_FILE"):
    from drift_recorder import install

    install()
