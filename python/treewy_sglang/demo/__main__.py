import sys

from treewy_sglang.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
