import sys

from treewy_sglang.cli import main

sys.exit(main())
