# make demo: set up, build the program, train a CNN on Fashion-MNIST on 2 ranks.   make test: set up, build and run all tests.
# make: set up, build the library and the program.
BUILD ?= build
# 32 files in one: less than half the time of a build from nothing. The presets compile each by itself.
UNITY = -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=32

.PHONY: build all demo test fast asan tsan docs wheel format format-check tidy clean

# Clang takes less time than GCC: it instantiates the templates of a precompiled header once, GCC in each file. A build
# folder keeps the compiler that it began with.
CONFIGURE = CXX="$${CXX:-$$(command -v clang++ || command -v c++)}" cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release $(UNITY)
# Tests that are configured already stay so.
WITHOUT_TESTS = test -f $(BUILD)/build.ninja || $(CONFIGURE) -DSHOAL_BUILD_TESTS=OFF -DSHOAL_BUILD_BENCH=OFF

# The library and the program, for cmake --install.
build:
	@scripts/setup
	@$(WITHOUT_TESTS)
	@cmake --build $(BUILD) --target libshoal shoal_cli

# The tests and the micro benchmarks as well.
all:
	@scripts/setup --tests
	@$(CONFIGURE) -DSHOAL_BUILD_TESTS=ON -DSHOAL_BUILD_BENCH=ON
	@cmake --build $(BUILD)

demo:
	@scripts/setup
	@$(WITHOUT_TESTS)
	@cmake --build $(BUILD) --target shoal_cli
	$(BUILD)/shoal train --model cnn --size small --data fashion-mnist --strategy ddp --ranks 2 --epochs 3 --eval --save checkpoints/demo
	@printf '%s\n' '' 'The model is trained. What to try next:' \
	  '  $(BUILD)/shoal train --model cnn --data fashion-mnist --strategy fsdp --ranks 2 --eval   another strategy' \
	  '  $(BUILD)/shoal checkpoint inspect checkpoints/demo                                        what was saved' \
	  '  $(BUILD)/shoal plan --model gpt --size small --ranks 4                                    memory and bytes of every strategy' \
	  '  $(BUILD)/shoal launch -n 2 -- PROGRAM                                                     a program of your own on 2 ranks' \
	  '  README.md: 20 lines of code, and how to install the library'

# Tests that keep two cores busy count as three of eight, so that two of them run at a time, and beside them others that wait
# for deadlines and for processes to start. libtorch's store asks the name service for the names of loopback addresses: a
# query that is lost takes a second then, and not five, which some tests would take for a rank's delay.
test fast: export RES_OPTIONS = timeout:1
test: all
	ctest --test-dir $(BUILD) --output-on-failure -j 8 || { scripts/failed_tests.py $(BUILD); exit 1; }

fast: all
	ctest --test-dir $(BUILD) --output-on-failure -j 8 -L fast

# Everything with sanitizers, and the tests that fit them; CMakePresets.json says which, and sets the sanitizers' options.
asan tsan:
	@scripts/setup --tests
	@cmake --preset $@
	@cmake --build --preset $@
	ctest --preset $@ -j 2

# The documentation's site, in $(BUILD)/docs/site. MkDocs and its theme come into .venv-docs.
docs:
	@python3 scripts/docs/build.py --out $(BUILD)/docs

# The Python package for this Python and its PyTorch, in $(BUILD)/dist.
wheel:
	@scripts/setup --wheel
	@$(WITHOUT_TESTS)
	@$(CONFIGURE) >/dev/null  # an earlier one may not have found Python's headers
	@cmake --build $(BUILD) --target wheel
	@ls $(BUILD)/dist/*.whl

format:
	git ls-files '*.h' '*.cpp' | xargs clang-format -i

format-check:
	git ls-files '*.h' '*.cpp' | xargs clang-format --dry-run -Werror

# clang-tidy reads neither GCC's precompiled headers nor its flags for them.
tidy:
	@test -f $(BUILD)-tidy/compile_commands.json || cmake -S . -B $(BUILD)-tidy -G Ninja -DSHOAL_CCACHE=OFF \
		-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
	run-clang-tidy -quiet -p $(BUILD)-tidy '$(CURDIR)/src/.*'

clean:
	rm -rf $(BUILD) $(BUILD)-debug $(BUILD)-asan $(BUILD)-tsan $(BUILD)-tidy
