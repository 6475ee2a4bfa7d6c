# make demo      set everything up and print the BERT table
# make test      set everything up and run every test but the long sweeps
# make check     format, lint, types, which package imports which
# make docs      the site, into site/
# make sweep     the long sweeps; writes docs/sweep.md
# make coverage  the tests again, and the lines that none of them reaches
# make mutants   300 small faults, and those that no test notices
# TORCH=torch==2.15.0 takes another torch; TORCH_INDEX=URL takes it from another package index (PyTorch's own has CPU
# builds: https://download.pytorch.org/whl/cpu). Where either is not what .venv was made with, .venv is made up anew.

VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin
TORCH := torch==2.13.0

.PHONY: demo test check docs sweep coverage mutants clean FORCE

demo: $(VENV)/.ready
	@$(RUN)/python scripts/bert_table.py
	@echo
	@echo "Try next (after: source $(VENV)/bin/activate):"
	@echo "  flopmeter run --hardware h100-sxm5-80gb YOUR_SCRIPT.py            what one step of a script that you have costs"
	@echo "  flopmeter table gpt2-124m --train --batch 8 -o report.html        one page: where time goes, what to change"
	@echo "  flopmeter compare gpt2-124m --train --hardware l4,a100-sxm4-80gb  the same program on other devices"

# The same random examples each time: a search that finds a new fault must not stop another change. `sweep` draws anew.
test: $(VENV)/.ready
	$(RUN)/python -m pytest -q -n auto -m "not slow" --hypothesis-seed=0

sweep: $(VENV)/.ready
	$(RUN)/python scripts/sweep.py

coverage: $(VENV)/.ready
	$(RUN)/python -m pytest -q -n auto -m "not slow" --cov=flopmeter --cov-report=term-missing:skip-covered

mutants: $(VENV)/.ready
	$(RUN)/python scripts/mutate.py

docs: $(VENV)/.ready
	$(RUN)/python -m pip install -qq -e ".[docs]" "$(TORCH)"
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict -f .mkdocs.yml

check: $(VENV)/.ready
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-cache

# The second install names torch again, so that nothing that it brings replaces that one.
$(VENV)/.ready: pyproject.toml $(VENV)/.torch
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting $(VENV) up: torch and what flopmeter is developed with (minutes, once)"
	@$(RUN)/python -m pip install -qq --upgrade pip
	@$(RUN)/python -m pip install -qq "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(RUN)/python -m pip install -qq -e ".[dev]" "$(TORCH)"
	@touch $@

$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo "$(TORCH) $(TORCH_INDEX)" | cmp -s - $@ || echo "$(TORCH) $(TORCH_INDEX)" > $@

clean:
	rm -rf $(VENV)
