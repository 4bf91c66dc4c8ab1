"""`task.*`: what is trained: next tokens, targets of sources, preferences, a reward, a policy, embeddings, labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hfdist.config.data import Packing, RowFormat
from hfdist.config.ranges import DAY_SECONDS, LIMIT, Limit, limited


class TaskLoss(Enum):
    """How preferences, or rewarded answers, become a loss; `Traits.losses` says which task has which."""

    sigmoid = "sigmoid"
    sigmoid_norm = "sigmoid_norm"
    robust = "robust"
    exo_pair = "exo_pair"
    hinge = "hinge"
    ipo = "ipo"
    nca_pair = "nca_pair"
    bco_pair = "bco_pair"
    sppo_hard = "sppo_hard"
    discopop = "discopop"
    apo_zero = "apo_zero"
    apo_down = "apo_down"
    simpo = "simpo"
    orpo = "orpo"
    kto = "kto"
    apo_zero_unpaired = "apo_zero_unpaired"
    grpo = "grpo"
    dapo = "dapo"
    dr_grpo = "dr_grpo"
    gspo = "gspo"
    cispo = "cispo"
    sapo = "sapo"
    vespo = "vespo"
    luspo = "luspo"
    reinforce_pp = "reinforce_pp"
    rloo = "rloo"
    ppo = "ppo"
    infonce = "infonce"
    infonce_both = "infonce_both"
    triplet = "triplet"
    cosent = "cosent"
    bce = "bce"
    ranknet = "ranknet"
    softmax = "softmax"


class Head(Enum):
    """What a model gives at its end.

    `tokens`: a distribution of the next token; `targets`: that of the next token of a target, of which an encoder has
    read the source; `masked`: that of a token whose place is hidden; `score`: one number, at the end of an answer;
    `labels`: a number for each label of a text; `token_labels`: the same of a token; `none`: its hidden states
    themselves.
    """

    tokens = "tokens"
    targets = "targets"
    masked = "masked"
    score = "score"
    labels = "labels"
    token_labels = "token_labels"
    none = "none"

    @property
    def gives_labels(self) -> bool:
        """Whether transformers' own class says all up to the loss; then each text is in a row of its own."""
        return self in (Head.labels, Head.token_labels)

    @property
    def is_padded(self) -> bool:
        """Whether texts are in rows of their own, filled up to the longest: they are never packed."""
        return self.gives_labels or self in (Head.targets, Head.masked)


class Pooling(Enum):
    """How the hidden states of a text become its embedding.

    `last`: that of its last token; `mean`: their mean; `cls`: that of its first token; `auto`: as the model's folder
    says for sentence-transformers, else `mean` where tokens see what comes after them, and `last` where they do not.
    """

    auto = "auto"
    last = "last"
    mean = "mean"
    cls = "cls"


class TeacherSharding(Enum):
    """Where the weights of a teacher are.

    `auto`: `sharded` where ranks share the weights of the student; `whole`: on each rank that computes losses;
    `sharded`: over these ranks, by FSDP2.
    """

    auto = "auto"
    whole = "whole"
    sharded = "sharded"


class InferenceServer(Enum):
    """Servers that can answer prompts in place of generators."""

    vllm = "vllm"
    sglang = "sglang"


MOST_SERVERS = 64
"""Most servers of a run."""
NO_SERVER = "task.server=null task.server_addresses=[] task.server_key_variable=null"
"""Overrides of a run without servers."""


class TaskName(Enum):
    """What a run trains.

    `causal_lm`: the next token; `dpo`: pairs of answers, directly; `cpo`: the same, without a reference; `kto`: answers
    that were liked or not; `reward`: a model that scores answers, from pairs; `grpo`, `rloo`: its own answers to
    prompts, by their rewards; `ppo`: the same, with a head of values; `online_dpo`: pairs of own answers; `distill`:
    what a teacher predicts for each next token; `embed`: embeddings of texts, by which a query finds the text that
    belongs to it; `classify`, `token_classify`: the labels of texts, and of their words; `rerank`: how well a text
    answers a query, read together; `seq2seq`: the target that an encoder-decoder writes of a source; `mlm`: tokens that
    are hidden from an encoder; `span_corruption`: spans that are left out of what an encoder-decoder reads.
    """

    causal_lm = "causal_lm"
    dpo = "dpo"
    cpo = "cpo"
    kto = "kto"
    reward = "reward"
    grpo = "grpo"
    rloo = "rloo"
    ppo = "ppo"
    online_dpo = "online_dpo"
    distill = "distill"
    embed = "embed"
    classify = "classify"
    token_classify = "token_classify"
    rerank = "rerank"
    seq2seq = "seq2seq"
    mlm = "mlm"
    span_corruption = "span_corruption"

    @property
    def traits(self) -> Traits:
        """What the rest of hfdist must know of it."""
        return TRAITS[self]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What tells one task from another outside of its objective."""

    trainer: str
    """The class of a peer that trains so."""
    learning_rate: float
    """Peak rate for all weights: that class's default."""
    loss_unit: str
    """What the training loss is the mean of, in words for an axis."""
    unit: str = "document"
    """What a row of its data is called."""
    method: str = ""
    """How it trains, for a model card; empty: nothing to explain."""
    row_format: RowFormat | None = None
    """The format that rows must have; None: any of the others."""
    keys: tuple[str, ...] = ()
    """Which keys of `task` say something of it; others must stay as they are."""
    losses: tuple[TaskLoss, ...] = ()
    """What `task.loss` may be; empty: it has no choice."""
    has_reference: bool = False
    """Whether its rows are compared with the model that it begins with."""
    is_of_next_tokens: bool = False
    """Whether it trains the next tokens of texts, so that its loss has a perplexity."""
    reads_images: bool = False
    """Whether its rows may have images, with a model that reads them."""
    packing: Packing | None = None
    """What `data.packing=auto` is; None: as the rows need it."""
    hides_tokens: bool = False
    """Whether tokens of a document are hidden from the model, other ones in each epoch: they are what it learns."""
    is_reinforcement: bool = False
    """Whether the model answers prompts, and learns from the rewards."""
    has_values: bool = False
    """Whether the model gets a head of values, which says how much reward each token may still expect."""
    has_teacher: bool = False
    """Whether a second model says what it should predict, at the targets of the rows that next tokens have."""
    peer: str = "TRL"
    """The library that has this class: TRL 1.16, or another one."""
    head: Head = Head.tokens
    """What the model gives at its end."""
    reads_twice: bool = False
    """Whether a step reads all its rows before it trains on them: its loss compares each with all others."""

    @property
    def pads_documents(self) -> bool:
        """Whether a row of a batch is read as padded rows, a document each; and what is held out is one of them."""
        return self.head.is_padded and not self.head.gives_labels

    @property
    def writes_text(self) -> bool:
        """Whether the model predicts tokens one after the other, so that it can be sampled."""
        return self.head in (Head.tokens, Head.targets)


_PAIR_KEYS = ("loss", "beta", "label_smoothing", "margin", "nll_weight")
_REFERENCE_KEYS = ("ref_model_sync_steps", "ref_model_mixup_alpha")
_ANSWER_KEYS = (
    "loss", "beta", "num_generations", "max_new_tokens", "temperature", "top_k", "top_p", "rewards", "reward_model",
    *_REFERENCE_KEYS,
)  # fmt: skip
_POLICY_KEYS = (
    *_ANSWER_KEYS, "clip", "clip_high", "delta", "off_policy_mask_threshold", "mask_truncated", "generators",
    "max_staleness", "sync_every", "answer_seconds", "generators_port", "generators_host", "server", "server_addresses",
    "server_key_variable", "environment", "environment_url", "environment_seconds", "max_turns",
)  # fmt: skip
_KEYS_OF_TEXT = ("generators", "generators_port", "server", "environment", "reward_model", "trained_prompts")
"""Keys by which prompts are answered, or answers used, in a way that is not tried with images yet."""

_REFERENCE_LOSSES = (
    TaskLoss.sigmoid, TaskLoss.sigmoid_norm, TaskLoss.robust, TaskLoss.exo_pair, TaskLoss.hinge, TaskLoss.ipo,
    TaskLoss.nca_pair, TaskLoss.bco_pair, TaskLoss.sppo_hard, TaskLoss.discopop, TaskLoss.apo_zero, TaskLoss.apo_down,
)  # fmt: skip
"""Losses of a pair that is compared with a reference."""

TRAITS = {
    TaskName.causal_lm: Traits(
        trainer="SFTTrainer",
        learning_rate=2e-5,
        loss_unit="nats a token",
        is_of_next_tokens=True,
        reads_images=True,
    ),
    TaskName.dpo: Traits(
        trainer="DPOTrainer",
        learning_rate=1e-6,
        loss_unit="mean of pairs",
        keys=(*_PAIR_KEYS, *_REFERENCE_KEYS),
        unit="pair",
        method="by direct preference optimization (DPO, arXiv 2305.18290) on pairs of answers",
        row_format=RowFormat.preference,
        losses=_REFERENCE_LOSSES,
        has_reference=True,
        reads_images=True,
    ),
    TaskName.cpo: Traits(
        trainer="CPOTrainer",
        learning_rate=1e-6,
        loss_unit="mean of pairs",
        keys=_PAIR_KEYS,
        unit="pair",
        method="on pairs of answers, without a reference model",
        row_format=RowFormat.preference,
        losses=(TaskLoss.sigmoid, TaskLoss.hinge, TaskLoss.ipo, TaskLoss.simpo, TaskLoss.orpo),
        reads_images=True,
    ),
    TaskName.kto: Traits(
        trainer="KTOTrainer",
        learning_rate=1e-6,
        loss_unit="mean of answers",
        keys=("loss", "beta", "desirable_weight", "undesirable_weight"),
        unit="answer",
        method="by Kahneman-Tversky optimization (KTO, arXiv 2402.01306) on answers that were liked or not",
        row_format=RowFormat.unpaired_preference,
        losses=(TaskLoss.kto, TaskLoss.apo_zero_unpaired),
        has_reference=True,
    ),
    TaskName.reward: Traits(
        trainer="RewardTrainer",
        learning_rate=1e-4,
        loss_unit="mean of pairs",
        keys=("loss",),
        unit="pair",
        method="on pairs of answers: the chosen one of a pair is to have the higher score",
        row_format=RowFormat.preference,
        losses=(TaskLoss.sigmoid,),
        head=Head.score,
    ),
    TaskName.grpo: Traits(
        trainer="GRPOTrainer",
        learning_rate=1e-6,
        loss_unit="mean of tokens or answers",
        keys=(*_POLICY_KEYS, "trained_prompts", "scale_rewards"),
        unit="prompt",
        method="by group relative policy optimization (GRPO, arXiv 2402.03300): its own answers, by their rewards",
        losses=(
            TaskLoss.grpo,
            TaskLoss.dapo,
            TaskLoss.dr_grpo,
            TaskLoss.gspo,
            TaskLoss.cispo,
            TaskLoss.sapo,
            TaskLoss.vespo,
            TaskLoss.luspo,
            TaskLoss.reinforce_pp,
        ),
        is_reinforcement=True,
        reads_images=True,
    ),
    TaskName.rloo: Traits(
        trainer="RLOOTrainer",
        learning_rate=1e-6,
        loss_unit="mean of answers",
        keys=(*_POLICY_KEYS, "trained_prompts"),
        unit="prompt",
        method="by REINFORCE leave-one-out (RLOO, arXiv 2402.14740): its own answers, by their rewards",
        losses=(TaskLoss.rloo,),
        is_reinforcement=True,
        reads_images=True,
    ),
    TaskName.ppo: Traits(
        trainer="PPOTrainer",
        learning_rate=3e-6,
        loss_unit="mean of tokens",
        keys=(*_POLICY_KEYS, "gamma", "gae_lambda", "value_weight"),
        unit="prompt",
        method="by proximal policy optimization (PPO, arXiv 1707.06347): its own answers, by rewards and values",
        losses=(TaskLoss.ppo,),
        is_reinforcement=True,
        has_values=True,
    ),
    TaskName.online_dpo: Traits(
        trainer="OnlineDPOTrainer",
        learning_rate=5e-7,
        loss_unit="mean of pairs",
        keys=(*_ANSWER_KEYS, "label_smoothing", "nll_weight"),
        unit="prompt",
        method="by online DPO (arXiv 2402.04792): pairs of the best and the worst of its own answers, by their rewards",
        losses=_REFERENCE_LOSSES,
        is_reinforcement=True,
    ),
    TaskName.distill: Traits(
        trainer="GKDTrainer",
        learning_rate=2e-5,
        loss_unit="nats a token",
        keys=(
            "teacher",
            "divergence_beta",
            "teacher_top_k",
            "teacher_sharding",
            "on_policy",
            "max_new_tokens",
            "temperature",
            "top_k",
            "top_p",
        ),
        method="by distillation: it learns what a teacher predicts for each next token (GKD, arXiv 2306.13649)",
        has_teacher=True,
    ),
    TaskName.embed: Traits(
        trainer="SentenceTransformerTrainer",
        peer="sentence-transformers",
        learning_rate=5e-5,
        loss_unit="mean of queries",
        keys=("loss", "margin", "scale", "pooling", "normalize", "matryoshka", "mask_duplicates"),
        unit="row",
        method="as an embedding model, by a contrastive loss over all texts of a step (arXiv 1705.00652)",
        row_format=RowFormat.retrieval,
        losses=(TaskLoss.infonce, TaskLoss.infonce_both, TaskLoss.triplet, TaskLoss.cosent),
        head=Head.none,
        reads_twice=True,
    ),
    TaskName.classify: Traits(
        trainer="Trainer",
        peer="transformers",
        learning_rate=5e-5,
        loss_unit="mean of texts",
        unit="row",
        method="to give texts their labels",
        row_format=RowFormat.labelled,
        head=Head.labels,
    ),
    TaskName.token_classify: Traits(
        trainer="Trainer",
        peer="transformers",
        learning_rate=5e-5,
        loss_unit="mean of words",
        unit="row",
        method="to give words their labels",
        row_format=RowFormat.tagged,
        head=Head.token_labels,
    ),
    TaskName.rerank: Traits(
        trainer="CrossEncoderTrainer",
        peer="sentence-transformers",
        learning_rate=5e-5,
        loss_unit="mean of pairs or queries",
        keys=("loss",),
        unit="row",
        method="as a cross-encoder: it reads a query with a text, and says how well the text answers it",
        row_format=RowFormat.ranking,
        losses=(TaskLoss.bce, TaskLoss.ranknet, TaskLoss.softmax),
        head=Head.labels,
    ),
    TaskName.seq2seq: Traits(
        trainer="Seq2SeqTrainer",
        peer="transformers",
        learning_rate=5e-5,
        loss_unit="nats a target token",
        unit="row",
        method="as an encoder-decoder, which writes the target of a source",
        row_format=RowFormat.source_target,
        packing=Packing.none,
        head=Head.targets,
    ),
    TaskName.mlm: Traits(
        trainer="Trainer",
        peer="transformers",
        learning_rate=5e-5,
        loss_unit="nats a hidden token",
        keys=("mlm_probability", "mask_replace_prob", "random_replace_prob"),
        method="as a masked language model: it learns which tokens were hidden from it (BERT, arXiv 1810.04805)",
        row_format=RowFormat.text,
        packing=Packing.best_fit,
        hides_tokens=True,
        head=Head.masked,
    ),
    TaskName.span_corruption: Traits(
        trainer="Seq2SeqTrainer",
        peer="transformers",
        learning_rate=5e-5,
        loss_unit="nats a target token",
        keys=("noise_density", "mean_noise_span_length"),
        method="by span corruption: it writes spans that were left out of what it reads (T5, arXiv 1910.10683)",
        row_format=RowFormat.text,
        packing=Packing.best_fit,
        hides_tokens=True,
        head=Head.targets,
    ),
}
"""Each task's: a task is a member of `TaskName` and its entry here."""

PRESETS = ("simpo", "orpo")
"""Other options of the group `task`: settings of `cpo`, named after the loss."""

SCORE = "score"
"""The layer of a model for sequence classification, as transformers calls it."""

REWARD_MODEL = "reward_model"
"""The name among rewards of a model's score."""

ENVIRONMENT = "environment"
"""The name among rewards of what an environment gives."""

_SCALES = Limit("true, false or batch", lambda value: value in (True, False, "batch"))


@dataclass(kw_only=True)
class TaskConfig:
    """What is trained, and how strictly."""

    name: TaskName = TaskName.causal_lm
    """What is learned: causal_lm | dpo | cpo | kto | reward | grpo | rloo | ppo | online_dpo | distill |
    embed | classify | token_classify | rerank | seq2seq | mlm | span_corruption."""
    loss: TaskLoss = TaskLoss.sigmoid
    """dpo, online_dpo: sigmoid | sigmoid_norm | robust | exo_pair | hinge | ipo | nca_pair | bco_pair | sppo_hard |
    discopop | apo_zero | apo_down; cpo: sigmoid | hinge | ipo | simpo | orpo; kto: kto | apo_zero_unpaired;
    reward: sigmoid; grpo: grpo | dapo | dr_grpo | gspo | cispo | sapo | vespo | luspo | reinforce_pp; rloo: rloo;
    ppo: ppo; embed: infonce | infonce_both | triplet | cosent; rerank: bce | ranknet | softmax."""

    # ---- a reference, and losses of pairs ----

    beta: float = limited(0.1, at_least=0)
    """How strictly the model stays with the one that it begins with; grpo, rloo, ppo: 0: not at all.

    cpo: the factor of log-probabilities in the loss; orpo: the weight of the odds ratio.
    """
    ref_model_sync_steps: int | None = limited(None, at_least=1)
    """dpo, online_dpo, grpo, rloo, ppo: steps after which the reference moves towards the model (TR-DPO).

    null: it stays.
    """
    ref_model_mixup_alpha: float = limited(0.6, above=0, at_most=1)
    """task.ref_model_sync_steps: the model's share of the reference's new weights."""
    label_smoothing: float = limited(0.0, at_least=0, at_most=0.49)
    """robust, exo_pair: the share of pairs that may be the wrong way round."""
    margin: float = limited(0.0, at_least=0)
    """simpo: by how much the reward of a chosen answer should exceed that of the rejected one; triplet: by how much a
    negative should be farther away."""
    nll_weight: float = limited(0.0, at_least=0)
    """dpo, cpo, online_dpo: weight of the loss of next tokens in chosen answers, which is added."""
    desirable_weight: float = limited(1.0, at_least=0)
    """kto: weight of answers that were liked."""
    undesirable_weight: float = limited(1.0, at_least=0)
    """kto: weight of answers that were not liked."""

    # ---- the model's own answers, and their rewards ----

    num_generations: int = limited(8, at_least=1)
    """grpo, rloo, ppo, online_dpo: answers to each prompt; a sequence of train.*_batch_size is a prompt.

    A forward has so many rows for each. All but ppo compare answers, and need 2.
    """
    max_new_tokens: int = limited(256, at_least=1)
    """grpo, rloo, ppo, online_dpo, distill: most tokens of an answer; of an episode, with what the model reads."""
    temperature: float = limited(1.0, above=0)
    """Temperature of the distribution that answers are drawn from; distill: of student and teacher in the loss, too."""
    top_k: int | None = limited(None, at_least=1)
    """grpo, rloo, ppo, online_dpo, distill: number of the likeliest tokens that an answer is drawn from; null: all."""
    top_p: float = limited(1.0, above=0, at_most=1)
    """grpo, rloo, ppo, online_dpo, distill: probability that the tokens which answers are drawn from reach together."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards with their weights: {arithmetic: 1.0}; arithmetic, code, overlong, reward_model, environment, or of
    installed packages.

    Packages offer them by entry points `hfdist.rewards`.
    """
    reward_model: str | None = None
    """grpo, rloo, ppo, online_dpo: folder of the model that the reward `reward_model` is the score of."""

    # ---- grpo, rloo, ppo: losses of policies ----

    scale_rewards: bool | str = field(default=True, metadata={LIMIT: _SCALES})
    """grpo: whether advantages are divided by a standard deviation of rewards, in the losses that do so.

    With batch, that of all rewards of a step takes the place of the loss's own.
    """
    clip: float | None = limited(0.2, above=0)
    """grpo, rloo, ppo: how far a ratio of new to old probabilities may lie from 1 and count fully; null: the loss's.

    The options of these tasks say null. Bounds of losses are 0.2; gspo: 3e-4.
    """
    clip_high: float | None = limited(None, above=0)
    """grpo, rloo, ppo: how far it may lie above 1; null: as task.clip, or the loss's own.

    They are 0.2; dapo: 0.28; gspo: 4e-4; cispo: 4.
    """
    delta: float = limited(3.0, above=1)
    """grpo, rloo, ppo: the largest ratio that counts where the bound above does not (two-sided clip, dual clip)."""
    off_policy_mask_threshold: float | None = limited(None, at_least=0)
    """generators: mean of log(old / new probability) above which a bad answer does not train; null: all do.

    A bad answer is one with an advantage below 0.
    """
    trained_prompts: int | None = limited(None, at_least=1)
    """grpo, rloo: prompts of a step that train; null: all.

    Those whose answers have different rewards come first (dynamic sampling of DAPO); <= train.global_batch_size.
    """
    mask_truncated: bool = False
    """grpo, rloo, ppo: whether answers that were cut off do not train; their rewards count among those of their
    prompt."""

    # ---- ppo: a head of values ----

    gamma: float = limited(1.0, above=0, at_most=1)
    """ppo: what a reward counts for each token that it comes later (discount)."""
    gae_lambda: float = limited(0.95, at_least=0, at_most=1)
    """ppo: 0: an advantage reaches to the next token's value; 1: to the end of the answer (GAE, arXiv 1506.02438)."""
    value_weight: float = limited(0.1, at_least=0)
    """ppo: weight of the loss of values, which is added."""

    # ---- grpo, rloo, ppo: answers beside the ranks ----

    generators: int = limited(0, at_least=0)
    """grpo, rloo, ppo: processes beside the ranks that answer prompts; 0, without a port: the ranks, in the step."""
    max_staleness: int = limited(1, at_least=0)
    """generators: steps by which the policy that gave an answer may be older than the one that it trains."""
    sync_every: int = limited(1, at_least=1)
    """generators: steps between the policies that they get; <= max_staleness + 1."""
    answer_seconds: float = limited(600.0, above=0, at_most=DAY_SECONDS)
    """generators: time after which a prompt goes to another one, too."""
    generators_port: int | None = limited(None, at_least=1, at_most=65535)
    """grpo, rloo, ppo: where `hfdist generate` of other machines may join; null: nobody may."""
    generators_host: str | None = None
    """generators: address of rank 0's machine to listen at; null: all with HFDIST_ISLANDS_SECRET, 127.0.0.1 without."""

    server: InferenceServer | None = None
    """grpo, rloo, ppo: vllm | sglang: what answers prompts in place of generators; null: no server."""
    server_addresses: list[str] = field(default_factory=list)
    """server: where they run: [http://HOST:8000], 64 at most; they read each version from the run's folder."""
    server_key_variable: str | None = None
    """server: variable of the environment with the API key, such as VLLM_API_KEY; null: the servers ask for none."""

    # ---- grpo, rloo, ppo: answers of several turns ----

    environment: str | None = None
    """grpo, rloo, ppo: what the model acts in, turn by turn: calculator, code, guess, openenv, reasoning_gym, or of
    installed packages; null: a prompt has one answer.

    Packages offer them by entry points `hfdist.environments`.
    """
    environment_url: str | None = None
    """openenv: address of the server, such as ws://127.0.0.1:8000/ws."""
    environment_seconds: float = limited(60.0, above=0, at_most=3600)
    """environment: time for what comes of a turn; an episode that takes longer fails, and does not train."""
    max_turns: int = limited(8, at_least=1)
    """environment: most turns of the model in an episode."""

    # ---- distill: a teacher ----

    teacher: str | None = None
    """distill: folder of the model that the trained one learns from; it has the same tokens."""
    divergence_beta: float = limited(0.0, at_least=0, at_most=1)
    """distill: 0: KL(teacher || student); 1: KL(student || teacher); between: of both from their mix.

    The mix has `divergence_beta` of the teacher (generalized Jensen-Shannon divergence, arXiv 2306.13649).
    """
    teacher_top_k: int | None = limited(None, at_least=1)
    """distill: number of the teacher's likeliest tokens that are kept on disk for each target; null: it computes all.

    They are computed before the first step. Then the teacher is not in memory, and all other tokens count as one.
    """
    teacher_sharding: TeacherSharding = TeacherSharding.auto
    """distill: auto | whole | sharded: whether the ranks that compute losses share the teacher's weights."""
    on_policy: float = limited(0.0, at_least=0, at_most=1)
    """distill: share of the steps whose answers the model itself draws; the other steps have those of the rows."""

    # ---- embed ----

    scale: float = limited(20.0, above=0)
    """embed: what similarities are multiplied by, which is one over the temperature."""
    pooling: Pooling = Pooling.auto
    """embed: what the embedding of a text is: auto | last (the state of its end token) | mean (of all its tokens) | cls
    (the state of its first token); auto: as the model's folder says, else mean for encoders and last for others."""
    normalize: bool = True
    """embed: whether embeddings have the length 1, so that their similarity is a cosine; else it is a product."""
    matryoshka: list[int] = field(default_factory=list)
    """embed: the loss is the sum of those of the first so many dimensions of each embedding: [64, 128]; []: of all."""
    mask_duplicates: bool = False
    """embed: whether a text that equals a query's positive, and the positive of an equal query, are no negatives of
    it; infonce, infonce_both."""

    # ---- mlm, span_corruption ----

    mlm_probability: float = limited(0.15, above=0, at_most=1)
    """mlm: probability with which a token, unless it is a special one, is hidden from the model."""
    mask_replace_prob: float = limited(0.8, at_least=0, at_most=1)
    """mlm: share of the hidden tokens for which the mask token stands."""
    random_replace_prob: float = limited(0.1, at_least=0, at_most=1)
    """mlm: share of the hidden tokens for which any token stands; the others stay as they are."""
    noise_density: float = limited(0.15, above=0, at_most=0.9)
    """span_corruption: share of a document's tokens that are left out."""
    mean_noise_span_length: float = limited(3.0, at_least=1)
    """span_corruption: mean number of tokens of a span that is left out."""

    @property
    def row_format(self) -> RowFormat | None:
        """The format that rows must have; None: any of the others."""
        return RowFormat.scored_pair if self.loss is TaskLoss.cosent else self.name.traits.row_format

    @property
    def uses_generators(self) -> bool:
        """Whether prompts are answered beside the ranks."""
        return self.generators > 0 or self.generators_port is not None or self.server is not None

    @property
    def used_for_text_alone(self) -> list[str]:
        """The keys that are used and do not go with images in prompts."""
        return [key for key in _KEYS_OF_TEXT if getattr(self, key) not in (None, 0)]

    @property
    def answers_prompts(self) -> bool:
        """Whether the model itself answers prompts in its steps, so that a row is one prompt."""
        return self.name.traits.is_reinforcement or self.on_policy > 0

    def count_spans(self, num_tokens: int) -> tuple[int, int]:
        """Give how many of at least two tokens span corruption leaves out, and in how many spans."""
        num_noise = min(max(round(num_tokens * self.noise_density), 1), num_tokens - 1)
        num_spans = max(round(num_noise / self.mean_noise_span_length), 1)
        return num_noise, min(num_spans, num_noise, num_tokens - num_noise)
