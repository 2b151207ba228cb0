"""A data set whose rows come out tokenised, each by the processor of its task."""

from nemo_rl_cpp.data.datasets import processed_dataset as house


class AllTaskProcessedDataset(house.AllTaskProcessedDataset):
    """Rows by task, see `nemo_rl_cpp.data.datasets.AllTaskProcessedDataset`."""

    def encode_single(self, text: str | list[str]) -> tuple[list[int], int]:
        """Token ids of a text, or of several turns joined, without special tokens, and how many they are."""
        turns = [text] if isinstance(text, str) else text
        ids = [i for turn in turns for i in self.tokenizer.encode(turn, add_special_tokens=False)]
        return ids, len(ids)
