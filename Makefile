# make test needs Go and make only, on any system. make check is what every change must pass,
# and make test-all runs everything; both want Debian 12. CONTRIBUTING.md says what the others
# are for.

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
GOTESTSUM   := gotest.tools/gotestsum@v1.13.0

# PARSING names the tests of what peers send, and PARSERS is the packages that have them.
PARSING     := Fuzz|Hostile|Segment|Format|Reassemble|Message|Negotiat|PrivateData|Violation|Protocol
PARSERS     := ./capture ./ibv ./ibv/iwarp ./internal/iwarpwire ./internal/ring ./internal/shmring ./internal/udconn

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

# $(call counted,packages,flags) runs tests. LEFT_OUT, if set, is a pattern of tests that are
# left out, and SHORT is -short for less volume. In make check and make test-all those that fail
# are run again, alone, twice at most, and the gate judges by the events of the tests.
SUM     := $(CURDIR)/bin/gotestsum
AGAIN   := --rerun-fails=2 --rerun-fails-max-failures=5 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race
counted  = $(SUM) --format=pkgname --hide-summary=skipped --packages='$(1)' \
	$${RDMANET_GATE:+$(AGAIN) --jsonfile="$$(mktemp "$$RDMANET_GATE/XXXXXX.json")"} -- -timeout=30m -skip="$${LEFT_OUT-}" $${SHORT-} $(2)

# $(call left,pattern) leaves out more tests.
left = LEFT_OUT="$${LEFT_OUT:+$$LEFT_OUT|}$(1)"

$(SUM): Makefile
	GOBIN=$(@D) $(GO) install $(GOTESTSUM)
	touch $@

.PHONY: all check test test-all unit root nested samehost samehost-quick tcp tcp-quick words word32 ccall guests programs more-programs vm rxe siw suites suites-quick race twins \
	soak bench fuzz lint format vet staticcheck workflows structure layers chart chart-check vuln tidy-check systems cross

all: lint cross test

# Every test of every module over the software device.
test:
	$(call tests)

# What every change must pass. internal/gate/left-out has the tests that it leaves out, with
# the reasons. The tests of the root module mostly wait, so other steps run beside them. go vet
# compiles what these tests use, and they need not be vetted again. The kernel of the
# guests is fetched meanwhile. If that fails, the step guests does it again and says why.
check: $(SUM)
ifndef RDMANET_SKIP_VM
	@vm/install
	@nice -n 19 vm/run -device siw -- true >/dev/null 2>&1 &
endif
	@RACE=-race SHORT='-short -vet=off' LEFT_OUT=$$(sed -n 's/  # .*//p' internal/gate/left-out | paste -sd '|') \
		$(GO) run ./internal/gate lint systems \
			root+nested+words+samehost-quick+tcp-quick+ccall$(if $(RDMANET_SKIP_VM),,+programs guests)

# All tests, in shards. SHARD names those to run. What has passed is kept in gate.state, so
# that a run that was stopped goes on where it was while the files are the same. The shards of
# devices are made of parts.
SHARD ?= lint cross unit samehost tcp word32 ccall rxe siw suites twins fuzz
test-all: $(SUM)
	@$(GO) run ./internal/gate -all -keep gate.state $(foreach shard,$(SHARD),$(call steps,$(shard)))

steps = $(if $(filter rxe siw,$(1)),$(addprefix $(1)-,$(or $(shell vm/part -list $(1)),parts)),$(1))

# What make test runs, with the race detector, which needs a C compiler: in the root module,
# and in those nested in it.
unit: root nested

root: $(SUM)
	@$(call counted,./...,-race)

nested: $(SUM)
	@for m in $(filter-out .,$(MODULES)); do (echo "== $$m"; cd $$m; $(call counted,./...,-race)) || exit 1; done

# The tests of connections over shared memory from their first message on, which otherwise
# begin with TCP; and the rings and links on arm64, which qemu-user plays.
samehost: $(SUM)
	@RDMANET_SAMEHOST=require $(call counted,. ./ibv/... ./internal/twin)
	@GOARCH=arm64 CGO_ENABLED=0 $(call counted,./internal/shmring ./ibv/iwarp,-exec=qemu-aarch64-static \
		-run='^Test(Link|Map|Memory|Carries|Wakes|Order)')

# The tests of connections that stay with TCP, as between two hosts.
tcp: $(SUM)
	@RDMANET_SAMEHOST=off $(call counted,. ./ibv/... ./internal/twin)

# Those of the root package that every change must pass over either: how bytes go, and how
# connections end.
samehost-quick tcp-quick: $(SUM)
	@RDMANET_SAMEHOST=$(if $(filter tcp-quick,$@),off,require) $(call counted,.,-race -run='^Test(Conn|Stream|Transfer|HalfClose|Close|Write|Process)')

# Words of 32 bits wrap where peers' lengths are not checked. No race detector has them. Some
# virtual machines start no programs for 386. There qemu-user plays arm, which is slow. It
# has no multicast, and starts no further processes.
words word32: export CGO_ENABLED := 0
NOT_ON_ARM := PageSizes|Process|Kill|Scribbl
runs386 = GOARCH=386 $(GO) test -run '^$$' ./internal/ring >/dev/null 2>&1
arm     = GOARCH=arm $(call counted,$(1),-exec=qemu-arm-static $(2))

# The tests of what peers send, with such words.
words: $(SUM)
	@if $(runs386); then GOARCH=386 $(call counted,. $(PARSERS),-run='$(PARSING)'); else \
		$(call left,$(NOT_ON_ARM)); $(call arm,. $(PARSERS),-run='$(PARSING)'); fi

# All tests of the root module with such words, or without 386 those that arm can run.
word32: $(SUM)
	GOARCH=386 $(GO) vet ./...
	@if $(runs386); then GOARCH=386 $(call counted,./...); else $(call left,$(NOT_ON_ARM)); \
		$(call arm,.,-run='$(PARSING)'); $(call arm,$(PARSERS)); fi

# Calls of C, directly and by cgo: here, and on arm64, which qemu-user plays. What ends the
# process needs a machine that starts programs for arm64, so it is left out there.
ccall: $(SUM)
	@$(call counted,./internal/ccall)
	@$(call left,FaultIsFatal|WithoutMemory); GOARCH=arm64 CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc \
		$(call counted,./internal/ccall,-exec='qemu-aarch64-static -L /usr/aarch64-linux-gnu')

# Those tests over rdma-core, on Soft-RoCE and siw in guests, that every change must pass.
# RDMANET_SKIP_VM=1 leaves out whatever needs guests.
guests: $(SUM) programs
	@$(GUESTS) vm/test -part change -part kernel-peers rxe siw

# All tests over rdma-core, or one part of them on one device, such as rxe-twins.
vm: rxe siw

rxe siw: $(SUM) programs more-programs
	@$(GUESTS) vm/test $@

rxe-%: $(SUM) programs more-programs
	@$(GUESTS) vm/test -part $* rxe

siw-%: $(SUM) programs more-programs
	@$(GUESTS) vm/test -part $* siw

GUESTS := GOTESTSUM=$(SUM) PROGRAMS=$(CURDIR)/bin/guests

# What guests run for every change, and what they run besides. GUESTFLAGS=-race has it built
# with the race detector.
programs:
	@mkdir -p bin/guests
	$(GO) test $(GUESTFLAGS) -c -o bin/guests/ . ./ibv/rdmacore
	$(GO) build -C examples/smb $(GUESTFLAGS) -o $(CURDIR)/bin/guests/ .
	$(GO) build -o bin/guests/ cmd/test2json

more-programs: programs
	$(GO) test $(GUESTFLAGS) -c -o bin/guests/ ./capture ./ibv/iwarp ./internal/regmem ./internal/tsharktest ./internal/twin
	$(GO) build $(GUESTFLAGS) -o bin/guests/ ./examples/devices ./examples/echo ./examples/http ./examples/yamux
	for m in datagrams grpc; do $(GO) build -C examples/$$m $(GUESTFLAGS) -o $(CURDIR)/bin/guests/ .; done

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

# With RACE=-race it vets the files of a build with the race detector, and the tests with the
# race detector use again what it compiles. Packages that have other files without the race
# detector are then vetted in both forms.
NOT_RACY := ./ibv/iwarp ./internal/ccall ./internal/shmring ./internal/soak
vet:
	$(call each,$(GO) vet $(RACE) ./...)
	$(if $(RACE),$(GO) vet $(NOT_RACY))

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

# Those that are checked with their tests.
CHECKS := linux/arm64 freebsd/amd64 darwin/arm64 windows/amd64

# What cannot run here must at least be right in its types, and find no fault with go vet.
systems:
	$(GO) -C internal/crossvet run . -C ../.. -tests $(CHECKS)
	$(GO) -C internal/crossvet run . -C ../.. $(BUILDS)

# The same with a compiler, also for the nested modules.
cross:
	$(call each,CGO_ENABLED=0 $(GO) build ./...)
	$(call each,GOOS=linux GOARCH=arm64 $(GO) vet ./...)
	$(call each,GOOS=freebsd GOARCH=amd64 $(GO) vet ./...)
	$(call each,GOOS=darwin GOARCH=arm64 $(GO) vet ./...)
	$(call each,GOOS=windows GOARCH=amd64 $(GO) vet ./...)
	@for os in $(BUILDS); do (echo "== $$os: go build ./..."; \
		CGO_ENABLED=0 GOOS=$${os%/*} GOARCH=$${os#*/} $(GO) build ./...) || exit 1; done

comma := ,
