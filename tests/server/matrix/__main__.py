import sys
from pathlib import Path

here = Path(__file__).resolve()
sys.path[:0] = [str(here.parents[1]), str(here.parents[3] / "python")]

from matrix.runner import main  # noqa: E402

sys.exit(main())
