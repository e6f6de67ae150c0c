"""`vera inspect`: what an adaptive cache does with one prompt, recorded step by step and drawn."""

from vera.inspection.picture import check_picture, save_picture
from vera.inspection.recorder import Inspection, inspect_cache
from vera.inspection.terminal import draw

__all__ = ["Inspection", "check_picture", "draw", "inspect_cache", "save_picture"]
