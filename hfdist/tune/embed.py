"""Embedding models: the loss compares each text with all texts of the global batch, whatever a micro batch holds.

    pass 1, no gradients     texts of all micro batches and data ranks -> embeddings, gathered [texts, width]
    the loss, on each rank   loss of each query; gradient of their sum by each embedding
    pass 2, micro batches    gradient of (embedding x its gradient) by the weights: that of the loss, exactly

So gradients add up over micro batches, data ranks and the stages of a pipeline as those of any other loss do (Gao et
al., 2021, arXiv 2101.06983: cached gradients). It costs one forward more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.collectives import gather_json
from hfdist.config.batch import IGNORED
from hfdist.config.data import ProblemType, TextsConfig
from hfdist.config.task import Head, TaskConfig, TaskLoss
from hfdist.data.label_tokens import to_classes
from hfdist.models.encoders import takes_texts_apart
from hfdist.models.loss.embedding_losses import (
    NEGATIVE,
    POSITIVE,
    QUERY,
    Texts,
    first_dimensions,
    losses_of,
    rank_correlation,
    ranks_of_positives,
)
from hfdist.models.pooling import TextTokens, pool_texts
from hfdist.models.positions import padding_id
from hfdist.models.texts_apart import TextsApart
from hfdist.strategies.engine import Batch, Forward, TrainerHooks
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.objective import Documents, Objective
from hfdist.trainer.training import Training
from hfdist.tune.embedding_folder import ending_texts, write_embedding_files

GRADIENTS = "embedding_gradients"
"""Key in a batch: the gradient of the sum of losses by each text's embedding; shape [rows, texts of a row, width]."""
SHARES = "embedding_losses"
"""Key in a batch: the loss of a text that is a query, else 0; shape [rows, texts of a row]."""


class Places(NamedTuple):
    """Where the texts of a batch stand, in the order of rows; each of shape [texts]."""

    kinds: torch.Tensor
    """QUERY, POSITIVE or NEGATIVE."""
    documents: torch.Tensor
    """Numbers of documents, as `Documents.of_token` has them."""
    rows: torch.Tensor
    first: torch.Tensor
    """Place of the first token among those of all rows."""
    last: torch.Tensor
    """Place of the last token."""

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """Find them: targets of queries are plain, those of other texts are marked, and what fills up has none."""
        documents = Documents.of(batch)
        is_query, is_other = documents.num_chosen_targets > 0, documents.num_rejected_targets > 0
        texts = (is_query | is_other).nonzero()[:, 0]
        starts = documents.is_first.flatten().nonzero()[:, 0]
        ends = torch.cat([starts[1:], starts.new_tensor([documents.is_first.numel()])]) - 1
        kinds = torch.where(is_query[texts], QUERY, NEGATIVE)
        kinds[1:][kinds[:-1] == QUERY] = POSITIVE
        last = ends[texts]
        return cls(kinds, texts, last // documents.is_first.shape[1], starts[texts], last)

    def among_row(self) -> torch.Tensor:
        """Give the number of each text within its row; shape [texts]."""
        first = torch.searchsorted(self.rows, self.rows)
        return torch.arange(len(self.rows), device=self.rows.device) - first


class Embeddings(Objective):
    """An embedding model. An item is a query; with `triplet` one that has a negative."""

    evaluates_itself = True

    def __init__(self, task: TaskConfig, texts: TextsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._task, self._texts = task, texts
        self._has_scores = task.loss is TaskLoss.cosent
        """Whether the third document of a row is the score of its two texts."""
        self.names = ("spearman",) if self._has_scores else ("recall_at_1", "mrr")
        self._tokenizer = ending_texts(tokenizer, texts)
        self._held_out: list[float] = []
        """The loss of each held-out query of the evaluation that is on."""

    def begin(self, training: Training) -> None:
        """See `Objective.begin`."""
        super().begin(training)
        model = cast(PreTrainedModel, training.model)
        self._reads_apart = takes_texts_apart(model, Head.none)
        """Whether each text is in a row of its own, as texts of a row would see each other."""
        self._padding = padding_id(model) or 0

    def write_files(self, folder: Path) -> None:
        """Write what sentence-transformers needs."""
        config = cast(PreTrainedModel, self._training.model).config
        width = config.get_text_config().hidden_size
        write_embedding_files(folder, self._tokenizer, width=width, task=self._task, texts=self._texts)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the queries that have a loss."""
        return self._have_loss(Places.of(batch).kinds).sum()

    def _have_loss(self, kinds: torch.Tensor) -> torch.Tensor:
        """Whether each query has a loss; shape [queries]."""
        queries = (kinds == QUERY).nonzero()[:, 0]
        if self._task.loss is not TaskLoss.triplet:
            return torch.ones_like(queries, dtype=torch.bool)
        after = nn.functional.pad(kinds, (0, 2), value=QUERY)[queries + 2]
        return after == NEGATIVE

    def begin_step(self, batches: list[Batch], hooks: TrainerHooks) -> list[Batch]:
        """Embed all texts of the step, and add to each batch what the loss is by its embeddings."""
        found = [Places.of(batch) for batch in batches]
        with evaluating(self._training, are_training=True) as forward:
            embeddings, own = self._embed(batches, forward)
        texts = self._gather_texts(embeddings.requires_grad_(), batches, found)
        with torch.enable_grad():
            losses = losses_of(texts, self._task)
            [gradients] = torch.autograd.grad(losses.sum(), embeddings)
        self._note_places(texts)
        shares = losses.new_zeros(len(embeddings)).masked_scatter(texts.kinds == QUERY, losses.detach())
        if dist.is_initialized():
            # Ranks that compute one loss together must have the same batch to the last bit.
            dist.broadcast(gradients, src=0)
            dist.broadcast(shares, src=0)
        sizes = [len(one.kinds) for one in found]
        parts = zip(batches, found, gradients[own].cpu().split(sizes), shares[own].cpu().split(sizes), strict=True)
        return [
            batch | {GRADIENTS: _by_rows(batch, place, of_texts), SHARES: _by_rows(batch, place, share)}
            for batch, place, of_texts, share in parts
        ]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the sum of the losses of the queries; its gradient is that of the loss of the global batch."""
        own = Places.of(batch)
        at = own.rows, own.among_row()
        product = (self._states(model, batch, own) * batch[GRADIENTS][at]).sum()
        return batch[SHARES][at].sum() + (product - product.detach())

    def begin_evaluation(self, batches: Iterable[Batch], forward: Forward) -> None:
        """Embed all held-out texts: each query is compared with all of them."""
        known = list(batches)
        embeddings, _ = self._embed(known, forward)
        texts = self._gather_texts(embeddings, known, [Places.of(batch) for batch in known])
        self._held_out = losses_of(texts, self._task)[self._have_loss(texts.kinds)].tolist()
        self._note_places(texts)

    def evaluate(self, forward: Forward) -> list[float]:
        """Give the losses of held-out queries."""
        return self._held_out

    def _note_places(self, texts: Texts) -> None:
        """Note where queries find their positives, or how scores and similarities go together; all note the same."""
        whole = first_dimensions(texts, texts.embeddings.shape[1], self._task)
        if self._has_scores:
            value = torch.tensor([rank_correlation(whole)])
            self._note(torch.ones_like(value, dtype=torch.bool), {"spearman": value})
            return
        found = ranks_of_positives(whole)
        figures = {"recall_at_1": (found == 1).float(), "mrr": 1 / found}
        self._note(torch.ones_like(found, dtype=torch.bool), figures)

    def _embed(self, batches: Sequence[Batch], forward: Forward) -> tuple[torch.Tensor, slice]:
        """Give the embeddings of the texts of all data ranks, in their order, and which are this one's. A collective.

        Each rank of a model replica gets them. Shape [texts, width], float32, on the device.
        """
        values: list[torch.Tensor] = []

        def embed(model: nn.Module, part: Batch) -> torch.Tensor:
            return self._states(model, part, Places.of(part))

        for batch in batches:
            values += forward(batch, embed)
        own = torch.cat(values) if values else torch.empty(0, 0)
        # One rank of each model replica has the embeddings.
        data_rank, device = self._training.strategy.topology.data_rank, self._training.args.device
        known = {rank: shape for rank, shape in gather_json([data_rank, list(own.shape)]) if shape[1]}
        counts = [known[rank][0] for rank in sorted(known)]
        start = sum(counts[:data_rank])
        whole = torch.zeros(sum(counts), known[data_rank][1], device=device)
        mine = slice(start, start + counts[data_rank])
        if values:
            whole[mine] = own
        if dist.is_initialized():
            # A rank without them adds zeros, which is exact.
            dist.all_reduce(whole)
        return whole, mine

    def _gather_texts(self, embeddings: torch.Tensor, batches: Sequence[Batch], found: Sequence[Places]) -> Texts:
        """Give the texts of all data ranks, in their order, on the device. A collective.

        `embeddings` are those of all; `batches` and `found` are this data rank's.
        """
        data_rank, is_masking = self._training.strategy.topology.data_rank, self._task.mask_duplicates
        own = [kind for one in found for kind in one.kinds.tolist()]
        own_digests = list(chain.from_iterable(map(_digests, batches, found))) if is_masking else []
        own_scores = list(chain.from_iterable(map(_scores, batches, found))) if self._has_scores else []
        by_rank = {rank: lists for rank, *lists in gather_json([data_rank, own, own_digests, own_scores])}
        in_order = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        kinds, digests, scores = (list(chain.from_iterable(of_ranks)) for of_ranks in in_order)
        number_of = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        tensor = partial(torch.tensor, dtype=torch.long, device=self._training.args.device)
        return Texts(
            embeddings,
            tensor(kinds),
            tensor([number_of[digest] for digest in digests]) if is_masking else None,
            torch.tensor(scores, device=embeddings.device) if self._has_scores else None,
        )

    def _states(self, model: nn.Module, batch: Batch, texts: Places) -> torch.Tensor:
        """Run the model, and give the embedding of each text before it is normalized; [texts, width], float32."""
        documents = Documents.of(batch)
        flat = self._read(model, batch, documents)
        number = torch.full((flat.shape[0],), len(texts.last), device=flat.device)
        number[texts.documents] = torch.arange(len(texts.last), device=flat.device)
        # Tokens that fill up a row count for a last text, which is left out.
        tokens = TextTokens(texts.first, texts.last, number[documents.of_token.flatten()])
        return pool_texts(flat, tokens, self._task.pooling)

    def _read(self, model: nn.Module, batch: Batch, documents: Documents) -> torch.Tensor:
        """Give the hidden state of each token of texts; shape [rows x tokens, width], float32."""
        ids, positions = batch["input_ids"], batch["position_ids"]
        if self._has_scores:
            # A score is no text: its tokens are no words.
            ids = torch.where(_are_of_pairs(batch, documents), ids, self._padding)
        if not self._reads_apart:
            states: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False)[0]
            return states.float().flatten(0, 1)
        # Documents without a target only fill up a row.
        has_targets = documents.sum((documents.labels != IGNORED).float()) > 0
        texts = TextsApart.of(documents.is_first, has_targets[documents.of_token])
        inputs = texts.take_apart(ids, fill=self._padding)
        apart: torch.Tensor = model(input_ids=inputs, attention_mask=texts.mask)[0]
        return texts.put_back(apart.float(), ids.numel())


def _digests(batch: Batch, texts: Places) -> Iterator[str]:
    """Give a digest of the tokens of each text."""
    ids = batch["input_ids"].flatten().cpu().numpy()
    for first, last in zip(texts.first.tolist(), texts.last.tolist(), strict=True):
        yield hashlib.blake2b(ids[first : last + 1].tobytes(), digest_size=8).hexdigest()


def _scores(batch: Batch, texts: Places) -> list[float]:
    """Give the score of each pair."""
    ids, lasts = batch["input_ids"].flatten(), texts.last[texts.kinds == NEGATIVE]
    return to_classes(torch.stack([ids[lasts - 1], ids[lasts]], 1), ProblemType.regression, 1).tolist()


def _are_of_pairs(batch: Batch, documents: Documents) -> torch.Tensor:
    """Which tokens are of a pair of texts, and not of its score, nor of a row without targets; [rows, tokens]."""
    found = Places.of(batch)
    is_text = torch.zeros_like(documents.num_chosen_targets, dtype=torch.bool)
    is_text[found.documents[found.kinds != NEGATIVE]] = True
    return is_text[documents.of_token]


def _by_rows(batch: Batch, texts: Places, values: torch.Tensor) -> torch.Tensor:
    """Put a value of each text of a batch at its row and its number there, 0 where a row has fewer texts."""
    number = texts.among_row()
    most = int(number.max()) + 1 if len(number) else 1
    padded = values.new_zeros(len(batch["labels"]), most, *values.shape[1:])
    padded[texts.rows, number] = values
    return padded
