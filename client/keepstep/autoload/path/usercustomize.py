"""Python runs this file after `sitecustomize`, but not in a virtual environment: for where another tool hides ours.

It is the code of our `sitecustomize` under another name: it begins if that one has not begun, and runs the
`usercustomize` that this file hides.
"""

import os
import sys
from importlib.machinery import SourceFileLoader

_CODE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py")  # noqa: PTH100, PTH118, PTH120
SourceFileLoader(__name__, _CODE).exec_module(sys.modules[__name__])
