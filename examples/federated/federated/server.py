"""The server: it averages what clients have learned, weighted by their tokens. It trains nothing, and sees no data."""

from __future__ import annotations

from pathlib import Path

from flwr.common import Context, Metrics, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import arrayrecord_to_parameters
from flwr.server import Grid, LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD

from federated.arrays import read_arrays, write_model

app = ServerApp()


def mean_loss(of_clients: list[tuple[int, Metrics]]) -> Metrics:
    """Weight the losses with which clients have begun their round by their tokens."""
    total = sum(number for number, _ in of_clients)
    loss = sum(number * metrics["loss"] for number, metrics in of_clients) / total
    print(f"held-out loss of the model that clients have got: {loss:.4f}", flush=True)
    return {"loss": loss}


def make_strategy(config: dict, model: Path) -> Strategy:
    """Make the strategy of the app's config."""
    kind = {"fedavg": FedAvg, "fedadam": FedAdam}[config["strategy"]]
    strategy: Strategy = kind(
        fraction_fit=float(config["participation"]),
        fraction_evaluate=0.0,
        min_fit_clients=max(1, round(float(config["participation"]) * int(config["clients"]))),
        min_available_clients=int(config["clients"]),
        on_fit_config_fn=lambda number: {"round": number},
        fit_metrics_aggregation_fn=mean_loss,
        initial_parameters=ndarrays_to_parameters(read_arrays(model)),
    )
    noise = float(config["noise-multiplier"])
    if noise > 0:
        sampled = round(float(config["participation"]) * int(config["clients"]))
        strategy = DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=noise, clipping_norm=float(config["clipping-norm"]), num_sampled_clients=sampled
        )
    return strategy


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write the model."""
    config, model = context.run_config, Path(str(context.run_config["model"]))
    legacy = LegacyContext(
        context=context,
        config=ServerConfig(num_rounds=int(config["rounds"])),
        strategy=make_strategy(config, model),
    )
    num_clients = int(config["clients"])
    secure = SecAggPlusWorkflow(
        num_shares=num_clients, reconstruction_threshold=num_clients - 1, max_weight=float(config["most-tokens"])
    )
    DefaultWorkflow(fit_workflow=secure if config["secure-aggregation"] else None)(grid, legacy)
    found = arrayrecord_to_parameters(legacy.state.array_records[MAIN_PARAMS_RECORD], keep_input=True)
    write_model(model, Path(str(config["out"])), parameters_to_ndarrays(found))
    print(f"model: {config['out']}", flush=True)
