"""README.md is a doctest where its reports are those of a torch whose streams were compared: on others they say so."""

from flopmeter.torch_names.dispatcher import COMPARED_VERSIONS, running_version

collect_ignore = [] if running_version() in COMPARED_VERSIONS else ["README.md"]
collect_ignore_glob = ["tests/programs/*"]  # scripts that tests run, which import more than the tests need
