package twin

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

var (
	firstSeed = flag.Uint64("twin.seed", 1, "the first `seed`")
	howMany   = flag.Int("twin.n", 0, "how many programs; 0 means 300, or 50 over an RDMA device")
	oneSeed   = flag.Uint64("twin.run", 0, "run the program of this `seed` alone, and print it")
	times     = flag.Int("twin.times", 1, "with -twin.run, how many `times`")
	parallel  = flag.Int("twin.parallel", 0, "how many programs at a time; 0 means 16, or 4 over an RDMA device")
	device    = flag.String("twin.device", "", "the `device`; empty means the software device, or what RDMANET_VM_ADDR stands for")
	stateFile = flag.String("twin.state", "", "a `file` that keeps which seeds this build has done, so that a long run can be resumed")
	findings  = flag.Int("twin.findings", 8, "stop after so many findings")
	attempts  = flag.Int("twin.shrink", 60, "how many smaller programs are tried for a finding")
)

// onRDMA is set where RDMANET_VM_ADDR names the address of an RDMA device.
var onRDMA = os.Getenv("RDMANET_VM_ADDR") != ""

// rdma is the provider of RDMA devices, which stays for good.
var rdma ibv.Provider

func TestMain(m *testing.M) {
	Serve()
	flag.Parse()
	name := ""
	if onRDMA {
		p, err := rdmacore.New(rdmacore.Config{})
		if err == nil {
			_, err = p.Devices()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		rdma, name = p, os.Getenv("RDMANET_VM_DEVICE")
	}
	os.Exit(leaktest.Main(m, name, os.Getenv("RDMANET_VM_ADDR"), func() (ibv.Provider, error) {
		if rdma == nil {
			return nil, errors.New("no RDMA device")
		}
		return rdma, nil
	}))
}

// newChecker returns what runs programs on the machine that the test runs on.
func newChecker(t testing.TB) *Checker {
	t.Helper()
	leaktest.Check(t)
	m := &Machine{Host: "127.0.0.1", Device: "iwarp", Linked: true, Noise: NewNoise()}
	t.Cleanup(m.Noise.Stop)
	if onRDMA {
		m.Host, m.Device, m.Linked, m.Slow, m.Provider = os.Getenv("RDMANET_VM_ADDR"), "rdma", false, true, rdma
	} else if os.Getenv(iwarp.SameHostEnv) == "" {
		m.Provider = iwarp.New(iwarp.Config{SameHost: iwarp.SameHostOff})
	} else {
		// Connections through a proxy do not use shared memory, so there is none.
		m.Linked, m.Provider = false, iwarp.New(iwarp.Config{})
	}
	if *device != "" {
		m.Device = *device
	}
	return &Checker{m}
}

// fits reports whether a program says something where it runs. Without a link that can be
// shaped, those that are about the link alone do not.
func (c *Checker) fits(p *Program) bool {
	if p.Apart && !processes {
		return false
	}
	return c.Linked || !p.Link.frozen() && !p.Link.cut()
}

// TestTwins runs random programs over TCP and over rdmanet.
func TestTwins(t *testing.T) {
	c := newChecker(t)
	if *oneSeed != 0 {
		p := Generate(*oneSeed)
		t.Logf("%#v", p)
		for i := range *times {
			if f := c.Confirm(c.Check(p)); f != nil {
				t.Errorf("run %d: %v", i, f)
			}
		}
		return
	}
	n, at := *howMany, *parallel
	if n == 0 {
		n = 300
		if onRDMA {
			n = 50
		}
	}
	if at == 0 {
		at = 16
		if onRDMA {
			at = 4
		}
	}
	if *stateFile != "" {
		c.shards(t, *firstSeed, n, at)
		return
	}
	for _, f := range c.batch(t, *firstSeed, n, at) {
		t.Errorf("%v", c.reduced(f))
	}
}

func (c *Checker) reduced(f *Finding) *Finding {
	if *attempts > 0 {
		return c.Reduce(f, *attempts)
	}
	return f
}

// shard is how many programs are run before the state file takes note of them.
const shard = 200

// build stands for the code that runs, so that what another build has done is done again.
func build(t *testing.T) string {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(program))[:16]
}

// shards runs the programs of n seeds in shards, but those that the state file has for this
// build, each shard on another number of processors. After each nothing may be left behind.
func (c *Checker) shards(t *testing.T, seed uint64, n, at int) {
	done := make(map[string]bool)
	old, err := os.ReadFile(*stateFile)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(old)) {
		done[strings.TrimSpace(line)] = true
	}
	state, err := os.OpenFile(*stateFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	procs := []int{1, 2, 4}
	prefix, news := "build "+build(t)+": ", false
	for i := 0; i < n; i += shard {
		first, count := seed+uint64(i), min(shard, n-i)
		name := fmt.Sprintf("%sseeds %d to %d: ok", prefix, first, first+uint64(count)-1)
		if done[name] {
			continue
		}
		news = true
		p := procs[i/shard%len(procs)]
		runtime.GOMAXPROCS(p)
		before := leaktest.Take()
		found := c.batch(t, first, count, at)
		before.Check(t)
		for _, f := range found {
			t.Errorf("with GOMAXPROCS=%d: %v", p, c.reduced(f))
			fmt.Fprintf(state, "%sseed %d with GOMAXPROCS=%d: %v\n", prefix, f.Seed, p, f.Violations[0])
		}
		if len(found) == 0 && !t.Failed() {
			fmt.Fprintln(state, name)
		}
		if t.Failed() {
			return
		}
	}
	if !news {
		t.Logf("nothing was run: this build has done all of them, as %s says", *stateFile)
	}
}

// TestStateOfAnotherBuild holds that a build runs what only others have done.
func TestStateOfAnotherBuild(t *testing.T) {
	old := *stateFile
	defer func() { *stateFile = old }()
	*stateFile = filepath.Join(t.TempDir(), "twins.state")
	c := newChecker(t)
	mine := "build " + build(t) + ": seeds 1 to 1: ok\n"
	for _, tt := range []struct{ before, after string }{
		{"", mine},
		{mine, mine},
		{"build 0123456789abcdef: seeds 1 to 1: ok\n", "build 0123456789abcdef: seeds 1 to 1: ok\n" + mine},
		{"seeds 1 to 1: ok\n", "seeds 1 to 1: ok\n" + mine},
	} {
		if err := os.WriteFile(*stateFile, []byte(tt.before), 0o644); err != nil {
			t.Fatal(err)
		}
		c.shards(t, 1, 1, 1)
		if after, err := os.ReadFile(*stateFile); err != nil || string(after) != tt.after {
			t.Errorf("%q has become %q, %v, not %q", tt.before, after, err, tt.after)
		}
	}
}

// batch runs n programs, several at a time, and returns the findings.
func (c *Checker) batch(t *testing.T, seed uint64, n, at int) (found []*Finding) {
	next, ran := seed, 0
	var mu sync.Mutex // of those and found
	var wg sync.WaitGroup
	begin := time.Now()
	for range at {
		wg.Go(func() {
			for {
				mu.Lock()
				enough := len(found) >= *findings || ran >= n
				var p *Program
				for !enough && (p == nil || !c.fits(p)) {
					p = Generate(next)
					next++
				}
				ran++
				mu.Unlock()
				if enough {
					return
				}
				if f := c.Check(p); f != nil {
					t.Logf("seed %d: %v", f.Seed, f.Violations[0])
					if testing.Verbose() {
						t.Logf("%v", f)
					}
					mu.Lock()
					found = append(found, f)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	suspects := found
	found = nil
	for _, f := range suspects {
		if f = c.Confirm(f); f != nil {
			found = append(found, f)
		}
	}
	t.Logf("%d programs from seed %d on, in %v, %d findings", min(ran, n), seed, time.Since(begin).Round(time.Millisecond), len(found))
	return found
}

// play runs one program, as Go code that a finding printed, and fails the test if it does
// what the contract does not permit.
func play(t *testing.T, p Program) {
	t.Helper()
	c := newChecker(t)
	if !c.fits(&p) {
		t.Skip("there is no link between the ends of an RDMA device, or no process for an end")
	}
	if f := c.Confirm(c.Check(&p)); f != nil {
		t.Errorf("%v", f)
	}
}

// TestPlay runs a small program of each kind of end.
func TestPlay(t *testing.T) {
	for _, p := range []Program{
		{Seed: 1, First: End{Writing: []Op{{Do: Write, Size: 100_000}}}},
		{Seed: 2, Peer: Plain, First: End{Writing: []Op{{Do: Write, Size: 100_000}}}, Other: End{Writing: []Op{{Do: Write, Size: 1000}}}},
		{Seed: 3, Peer: Plain, Swap: true, First: End{Writing: []Op{{Do: Write, Size: 1000}}}, Other: End{Writing: []Op{{Do: Write, Size: 500_000}}}},
	} {
		t.Run(p.Peer.String(), func(t *testing.T) { play(t, p) })
	}
}

// TestApart runs small programs whose second end has a process of its own.
func TestApart(t *testing.T) {
	if !processes {
		t.Skip("an end has no process of its own here")
	}
	wait := End{Writing: []Op{{Do: AwaitEnd}}}
	for _, swap := range []bool{false, true} {
		for name, p := range map[string]Program{
			"closes":    {Seed: 1, First: End{Writing: []Op{{Do: Write, Size: 1000}}}, Other: End{Writing: []Op{{Do: Write, Size: 300_000}}}},
			"exits":     {Seed: 2, First: wait, Other: End{Writing: []Op{{Do: Write, Size: 300_000}, {Do: Exit}}}},
			"suspended": {Seed: 3, First: wait, Other: End{Writing: []Op{{Do: Pause, Wait: 300 * at}}}, Suspends: []Span{{100 * at, 300 * at}}},
		} {
			t.Run(fmt.Sprint(name, swap), func(t *testing.T) {
				p.Apart, p.Swap = true, swap
				play(t, p)
			})
		}
		for name, p := range map[string]Program{
			"this end cannot be set up":  {First: End{Setup: Setup{MaxSegment: 1}}},
			"that process cannot set up": {Other: End{Setup: Setup{MaxSegment: 1}}},
		} {
			t.Run(fmt.Sprint(name, swap), func(t *testing.T) {
				p.Apart, p.Swap = true, swap
				if tr := Run(newChecker(t).Machine, &p, "rdma"); tr.Failed == "" {
					t.Error("a segment of one byte was agreed on")
				}
			})
		}
	}
}

// TestSetUpFails has the set-up of every third connection fail: each is a finding, but
// where an RDMA device has no port for it.
func TestSetUpFails(t *testing.T) {
	if onRDMA {
		t.Skip("the faults are those of the software device")
	}
	c := newChecker(t)
	s := verbstest.NewSwitch(c.Provider)
	c.Provider = s
	p := Program{Seed: 1, Peer: Plain, Swap: true, First: End{Writing: []Op{{Do: Write, Size: 1000}}}}
	for i := range 6 {
		if i%3 == 0 {
			s.FailNth(3, nil, verbstest.Connect)
		}
		f := c.Confirm(c.Check(&p))
		if failed := i%3 == 2; failed != (f != nil) || failed && f.Trace.Failed == "" {
			t.Errorf("run %d: %v", i, f)
		}
	}
	for _, device := range []string{iwarp.Name, ""} {
		c.Device = device
		s.FailNth(1, errno.EADDRNOTAVAIL, verbstest.Connect)
		if tr := Run(c.Machine, &p, "rdma"); (tr.Failed != "") != (device == iwarp.Name) {
			t.Errorf("no port on device %q: %q", device, tr.Failed)
		}
	}
}
