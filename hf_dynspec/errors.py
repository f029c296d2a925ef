"""The errors that hf_dynspec raises on purpose. Each message names what was wrong and how to mend it."""


class DynSpecError(Exception):
    """Base class of every error that this package raises on purpose."""


class NotBoundError(DynSpecError, RuntimeError):
    """The assistant was handed to a model that it is not bound to."""


class UnsupportedError(DynSpecError, ValueError):
    """A model, a pair of models or a `generate` argument that speculative decoding here cannot serve."""


class ConfigurationError(DynSpecError, ValueError):
    """A setting of a policy, an assistant or a configuration file is unknown, mistyped or out of range."""


class ArtifactError(DynSpecError, ValueError):
    """An artifact (configuration, ranking, router, …) is damaged, hostile or made for other models.

    Attributes:
        field: the part of the artifact that is at fault, such as `"model.safetensors: ranking"`.
    """

    def __init__(self, field: str, problem: str, fix: str):
        self.field = field
        super().__init__(f"{field}: {problem}. {fix}")
