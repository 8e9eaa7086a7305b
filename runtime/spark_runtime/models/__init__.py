"""The bundled demo model: a small trained mixture of experts, so that everything can be tried without a download.

4 layers of 64 experts, 8 chosen per token, 15.5 million parameters in Q4_0; trained from scratch for this project
(recipe in ``infra/demo-model``). Its routing is learned and depends on the domain of the text; its prose is not
meant to make sense.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """The GGUF file inside the installed package."""
    return Path(str(files(__name__).joinpath("nano-q4_0.gguf")))
