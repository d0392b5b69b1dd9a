"""A reward of the quickstart's GRPO for answers that are almost right. Used as `reward.py assets.quickstart.rewards:likeness`."""

from difflib import SequenceMatcher


def likeness(completions, answer, **columns):
    texts = [completion[0]["content"].strip() for completion in completions]
    return [SequenceMatcher(None, text, expected.strip()).ratio() for text, expected in zip(texts, answer)]
