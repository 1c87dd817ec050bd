"""The chapters in the order of the story."""

from __future__ import annotations

from levelhead.course.chapter import Chapter
from levelhead.course.chapters import (
    attack,
    by_hand,
    hook,
    online,
    overflow,
    real,
    rivals,
    root,
    saturation,
    softmax,
    training,
    walk,
)

_MODULES = (hook, by_hand, softmax, walk, root, saturation, training, overflow, rivals, attack, online, real)
CHAPTERS: tuple[Chapter, ...] = tuple(module.CHAPTER for module in _MODULES)
ORDER = tuple(chapter.id for chapter in CHAPTERS)
