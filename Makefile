# make test needs Go and make only, on any system. make test-all runs everything once, on
# Debian 12. CONTRIBUTING.md says what the others are for.

# The recipes are for bash. Those of make test need no shell, as Windows may have no bash.
ifneq ($(OS),Windows_NT)
SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
endif

GO          ?= go
COUNT       ?= 3
FUZZTIME    ?= 10000x
DEVICE      ?= iwarp
N           ?= $(if $(filter-out iwarp,$(DEVICE)),1000,20000)
SEED        ?= 1
DURATION    ?= 60m
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ACTIONLINT  := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0

# PARSING names the tests of what peers send.
PARSING     := Fuzz|Hostile|Segment|Format|Reassemble|Message|Negotiat|PrivateData|Violation|Protocol

# UPWARD is how many upward arrows internal/structure may find. It is only ever lowered.
UPWARD      := 4

# The root module and those nested in it; ./... does not cross from one to
# another.
MODULES := $(patsubst %/go.mod,%,$(wildcard ./go.mod ./*/go.mod ./*/*/go.mod))

# $(call each,command) runs command in the directory of every module.
each = @for m in $(MODULES); do (echo "== $$m: $(1)"; cd $$m; $(1)) || exit 1; done

# $(call tests,flags) is a go test command for each module. make runs them by itself,
# without a shell.
tests = $(foreach m,$(MODULES),$(GO) -C $m test $(1) -timeout=30m ./...$(newline))

define newline


endef

.PHONY: all test test-all unit samehost word32 ccall vm suites suites-quick race twins soak bench fuzz lint format vet \
	staticcheck workflows structure layers chart chart-check vuln tidy-check cross

all: lint cross test

# Every test of every module over the software device.
test:
	$(call tests)

# The same with the race detector, and the tests over rdma-core.
test-all: unit vm

# What make test runs, with the race detector, which needs a C compiler.
unit:
	$(call tests,-race)

# The tests of connections over shared memory from their first message on, which otherwise
# begin with TCP; and the rings and links on arm64, which qemu-user plays.
samehost:
	RDMANET_SAMEHOST=require $(GO) test -timeout=20m . ./ibv/... ./internal/twin
	GOARCH=arm64 CGO_ENABLED=0 $(GO) test -exec qemu-aarch64-static -run '^Test(Link|Map|Memory|Carries|Wakes|Order)' \
		./internal/shmring ./ibv/iwarp

# The root module's tests with 32-bit words, which wrap where peers' lengths are not
# checked. No race detector has them. Some virtual machines start no programs for 386.
# There qemu-user plays arm, which is slow. It has no multicast, and starts no further
# processes. So it runs only the tests of what peers send.
word32: export CGO_ENABLED := 0
word32:
	GOARCH=386 $(GO) vet ./...
	if GOARCH=386 $(GO) test -run '^$$' ./internal/ring; then \
		GOARCH=386 $(GO) test -timeout=30m ./...; else \
		GOARCH=arm $(GO) test -timeout=30m -exec qemu-arm-static -run '$(PARSING)' . && \
		GOARCH=arm $(GO) test -timeout=30m -exec qemu-arm-static -skip 'PageSizes|Process|Kill|Scribbl' \
			./capture ./ibv ./ibv/iwarp ./internal/iwarpwire ./internal/ring ./internal/shmring ./internal/udconn; fi

# Calls of C, directly and by cgo: here, and on arm64, which qemu-user plays. What ends the
# process needs a machine that starts programs for arm64, so it is left out there.
ccall:
	$(GO) test ./internal/ccall
	GOARCH=arm64 CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc $(GO) test -skip 'FaultIsFatal|WithoutMemory' \
		-exec 'qemu-aarch64-static -L /usr/aarch64-linux-gnu' ./internal/ccall

# The tests over rdma-core, on Soft-RoCE and siw in guests. RDMANET_SKIP_VM=1
# leaves them out.
vm:
	@[[ -n "$${RDMANET_SKIP_VM-}" ]] || vm/install
	vm/test

# The tests of other people's modules, over TCP and over rdmanet: all, or those that
# SUITE names. DEVICE=rxe and DEVICE=siw run them in guests. suites/table.go has the
# versions.
suites:
	@[[ "$(DEVICE)" == iwarp || -n "$${RDMANET_SKIP_VM-}" ]] || vm/install
	cd suites && $(GO) run . -device $(DEVICE) $(SUITE)

# Those of them that take less than a minute, on the software device.
suites-quick:
	cd suites && $(GO) run . -quick

# Every test several times over, in random order, on one processor and on two.
race:
	$(call each,$(GO) test -race -shuffle=on -count=$(COUNT) -cpu=1$(comma)2 -timeout=60m ./...)

# N random programs over TCP and over the software device, from SEED on, with the race
# detector, on 1, 2 and 4 processors in turn. What is done is kept in twins.state, so that
# a run that was stopped goes on where it was, while the code is the same. DEVICE=rxe and
# DEVICE=siw run fewer of them in a guest, where no link lies between the two ends.
twins:
	@[[ "$(DEVICE)" == iwarp || -n "$${RDMANET_SKIP_VM-}" ]] || vm/install
	@if [[ "$(DEVICE)" == iwarp ]]; then \
		$(GO) test -race -timeout=0 -v -run='^TestTwins$$' ./internal/twin -twin.n=$(N) -twin.seed=$(SEED) -twin.state='$(CURDIR)/twins.state'; else \
		$(GO) test -c -o twins-$(DEVICE).bin ./internal/twin && \
		vm/run -device $(DEVICE) -timeout 0 -leaks -env RDMANET_DEVICE=rdma -- \
		'$(CURDIR)/twins-$(DEVICE).bin' -test.timeout=0 -test.v -test.run='^TestTwins$$' -twin.n=$(N) -twin.seed=$(SEED); fi

# Connections of all kinds with random faults for DURATION, on the software device or in a
# guest (DEVICE=rxe, siw); internal/soak says what it looks at. The plot is soak.svg, or
# soak-rxe.svg and soak-siw.svg. It ends by itself, so the guest has no limit.
SOAK := soak$(if $(filter-out iwarp,$(DEVICE)),-$(DEVICE))
soak:
	@[[ "$(DEVICE)" == iwarp || -n "$${RDMANET_SKIP_VM-}" ]] || vm/install
	$(GO) build -o $(SOAK).bin ./internal/soak
	@if [[ "$(DEVICE)" == iwarp ]]; then ./$(SOAK).bin -duration $(DURATION) -rate 300 -o $(SOAK).svg; else \
		vm/run -device $(DEVICE) -timeout 0 -leaks -results . -- \
		sh -c './$(SOAK).bin -device rdma -addr $$RDMANET_VM_ADDR -conns 30 -duration $(DURATION) -o $$RDMANET_VM_RESULTS/$(SOAK).svg'; fi

# Every benchmark once; docs/performance.md has the commands for real figures.
bench:
	$(call each,$(GO) test -run='^$$' -bench=. -benchmem -timeout=60m ./...)

# Every fuzz target of every module, FUZZTIME each: so many inputs. Where that is a time,
# Go up to 1.26 says now and then that the target failed when the time is over
# (go.dev/issue/75804).
fuzz:
	@for m in $(MODULES); do \
		cd $$m; \
		$(GO) test -list='^Fuzz' ./... | awk '/^Fuzz/ { name[n++] = $$1 } \
			/^ok/ { for (i = 0; i < n; i++) print $$2, name[i]; n = 0 }' | \
		while read -r pkg target; do \
			echo "== $$pkg $$target"; \
			$(GO) test -run='^$$' -fuzz="^$$target\$$" -fuzztime=$(FUZZTIME) -fuzzminimizetime=10x "$$pkg" </dev/null; \
		done; \
		cd "$(CURDIR)"; \
	done

lint: format vet staticcheck workflows layers chart-check tidy-check

format:
	@files=$$(gofmt -l .); if [ -n "$$files" ]; then echo "gofmt these:"; echo "$$files"; exit 1; fi

vet:
	$(call each,$(GO) vet ./...)

staticcheck:
	$(call each,$(GO) run $(STATICCHECK) ./...)

# shellcheck and pyflakes are left out, so that the result does not depend on whether they are there.
workflows:
	$(GO) run $(ACTIONLINT) -shellcheck= -pyflakes= .github/workflows/*.yml

# Which parts use which, and what is against their order.
structure:
	@$(GO) run ./internal/structure

layers:
	$(GO) run ./internal/structure -max $(UPWARD) >/dev/null

# The chart of docs/performance.md, drawn from the tables there.
chart:
	$(GO) run ./internal/chart

# The chart must be that of the tables.
chart-check:
	$(GO) run ./internal/chart -check

# Needs the vulnerability database of the network, so it is not part of lint.
vuln:
	$(call each,$(GO) run $(GOVULNCHECK) ./...)

tidy-check:
	$(call each,$(GO) mod tidy -diff)

# Systems that the root module is built for besides, without its tests.
BUILDS := android/arm64 netbsd/amd64 openbsd/amd64 dragonfly/amd64 solaris/amd64 illumos/amd64 aix/ppc64 plan9/amd64 \
	js/wasm wasip1/wasm

# What cannot run here must at least compile, tests included.
cross:
	$(call each,CGO_ENABLED=0 $(GO) build ./...)
	$(call each,GOOS=linux GOARCH=arm64 $(GO) vet ./...)
	$(call each,GOOS=freebsd GOARCH=amd64 $(GO) vet ./...)
	$(call each,GOOS=darwin GOARCH=arm64 $(GO) vet ./...)
	$(call each,GOOS=windows GOARCH=amd64 $(GO) vet ./...)
	@for os in $(BUILDS); do (echo "== $$os: go build ./..."; \
		CGO_ENABLED=0 GOOS=$${os%/*} GOARCH=$${os#*/} $(GO) build ./...) || exit 1; done

comma := ,
