"""Types that every section of the settings is made of."""

from typing import Annotated

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
MOST = 2**17
Size = Annotated[int, Field(gt=0, le=MOST)]
"""Number of things that are counted out one by one, as GPUs and layers are: a slip of the keyboard must not compute for hours."""
Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""At most eleven days: the system's calls that wait for them count milliseconds in 31 bits, and take no infinity."""
Share = Annotated[float, Field(ge=0, le=1)]


class Strict:
    """Unknown keys are errors, in every section."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # `json_schema` of config/schema_problems.py adds the strings under fields
