//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// options are the flags.
type options struct {
	duration time.Duration
	device   string // device is "iwarp", or the name of an RDMA device.
	addr     string
	conns    int
	peers    int
	rss      int64 // rss is how many bytes resident memory may have grown by at the end.
	rate     int
	seed     uint64
	out      string
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	f.DurationVar(&o.duration, "duration", time.Minute, "how long connections are made")
	f.StringVar(&o.device, "device", "iwarp", "iwarp, or rdma for the RDMA device that has -addr")
	f.StringVar(&o.addr, "addr", "127.0.0.1", "the address to listen on")
	f.IntVar(&o.conns, "conns", 1000, "connections that home dials at a time")
	f.IntVar(&o.peers, "peers", 3, "processes that are killed")
	f.Int64Var(&o.rss, "rss", 64<<20, "bytes by which resident memory may be larger in the end")
	f.IntVar(&o.rate, "rate", 0, "connections a second that do what they are for, without which it fails")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()), "what chance follows from")
	f.StringVar(&o.out, "o", "", "a file for the plot, SVG")
	return o, f.Parse(args)
}

// peerEnv is the environment variable that makes a process a peer. Its value has the
// device, the address, and the address of home.
const peerEnv = "RDMANET_SOAK_PEER"

// noStart is the exit status of a peer that could not start.
const noStart = 1

func main() {
	if beAPeer() {
		return
	}
	o, err := parse(os.Args[1:])
	if err != nil {
		os.Exit(2)
	}
	time.AfterFunc(o.duration+15*time.Minute, func() { // The end of a run takes less time.
		debug.SetTraceback("all")
		panic("the soak does not end")
	})
	if err := soak(o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "soak failed:", err)
		os.Exit(1)
	}
}

func provider(device string) (ibv.Provider, error) {
	if device == "iwarp" {
		return iwarp.New(iwarp.Config{}), nil
	}
	return rdmacore.New(rdmacore.Config{})
}

// beAPeer makes the process a peer if peerEnv is set. The peer serves and dials until it is
// killed.
func beAPeer() bool {
	fields := strings.Fields(os.Getenv(peerEnv))
	if len(fields) != 3 {
		return false
	}
	p, err := provider(fields[0])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(noStart)
	}
	e, err := newEnd(rdmanet.Config{Provider: p}, fields[1], rand.Uint64())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(noStart)
	}
	e.peer = true
	fmt.Println(e.ln.Addr(), e.packetAddr())
	go func() { // The parent has ended when its pipe is closed.
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	ctx := context.Background()
	for range 8 {
		go e.dialOn(ctx, func() target { return target{stream: fields[2]} })
	}
	for err := range e.wrong {
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(3) // home notices this, as any end that it has not caused.
	}
	return true
}

// child is the process of a peer.
type child struct {
	mu     sync.Mutex
	cmd    *exec.Cmd
	stream string
	packet string
}

// start starts the process and reads its addresses.
func (c *child) start(o options, home string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s", peerEnv, o.device, o.addr, home),
		"GORACE="+os.Getenv("GORACE")+" halt_on_error=1 atexit_sleep_ms=0") // A race ends the peer at once, which kill notices.
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // An interrupt from the keyboard is for home only.
	if _, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err = cmd.Start(); err != nil {
		return err
	}
	var stream, packet string
	if _, err = fmt.Fscan(out, &stream, &packet); err != nil {
		_ = cmd.Process.Kill()
		ended := cmd.Wait()
		if cmd.ProcessState.ExitCode() != noStart {
			ended = fmt.Errorf("%w: %v", errPeer, cmd.ProcessState)
		}
		return errors.Join(fmt.Errorf("a peer did not start: %w", err), ended)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cmd, c.stream, c.packet = cmd, stream, packet
	return nil
}

// errPeer is the error of a peer that was not killed: it has found wrong bytes or a race,
// or has panicked.
var errPeer = errors.New("a peer has ended by itself, see what it printed")

// kill ends the process by SIGKILL. It returns an error if the process has ended before.
func (c *child) kill() error {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("%w: %v", errPeer, c.cmd.ProcessState)
}

func (c *child) target() target {
	c.mu.Lock()
	defer c.mu.Unlock()
	return target{stream: c.stream, packet: c.packet, killed: true}
}

// soak does the whole run.
func soak(o options, w *os.File) error {
	rnd := rand.New(rand.NewPCG(o.seed, 0))
	fmt.Fprintf(w, "soak: %v on %s, seed %d\n", o.duration, o.device, o.seed)
	inner, err := provider(o.device)
	if err != nil {
		return err
	}
	sw := verbstest.NewSwitch(inner)
	cfg := rdmanet.Config{Provider: sw, LingerTimeout: time.Second}
	// The warm-up makes what the process makes once and keeps. So it comes before the
	// first count.
	if err := warmUp(cfg, o.addr); err != nil {
		return fmt.Errorf("warm-up: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	before := state(sw, o.device)
	snapshot := leaktest.Take()

	ctx, cancel := context.WithTimeout(ctx, o.duration)
	defer cancel()
	home, err := newEnd(cfg, o.addr, o.seed)
	if err != nil {
		return err
	}
	var link *proxy
	if o.device == "iwarp" {
		if link, err = newProxy(home.ln.Addr().String(), o.seed); err != nil {
			return err
		}
	}
	children := make([]*child, o.peers)
	for i := range children {
		children[i] = new(child)
		if err := children[i].start(o, home.ln.Addr().String()); err != nil {
			return err
		}
	}
	var all sync.WaitGroup
	for i := range o.conns {
		all.Go(func() {
			home.dialOn(ctx, func() target {
				switch {
				case link != nil && i%8 == 0:
					return target{stream: link.addr(), killed: true, own: true, relayed: true}
				case i%2 == 0 && len(children) > 0:
					return children[i/2%len(children)].target()
				}
				return target{stream: home.ln.Addr().String(), packet: home.packetAddr(), own: true}
			})
		})
	}
	var graph plot
	var failed error
	f := faults{o: o, home: home, sw: sw, children: children, rnd: rnd}
	all.Go(func() { f.run(ctx) })
	begin, minute := time.Now(), time.Now()
	tick := time.NewTicker(time.Second)
loop:
	for {
		select {
		case <-ctx.Done():
			break loop
		case failed = <-home.wrong:
			cancel()
			break loop
		case <-tick.C:
			graph.add(time.Since(begin), float64(resident())/(1<<20), float64(home.open.Load()), float64(home.failures.Load()))
			if time.Since(minute) >= time.Minute {
				minute = time.Now()
				home.report(w, time.Since(begin), &f)
			}
		}
	}
	tick.Stop()
	took := time.Since(begin)
	if !within(2*time.Minute, all.Wait) {
		buf := make([]byte, 4<<20)
		return errors.Join(failed, fmt.Errorf("connections hang: %s", buf[:runtime.Stack(buf, true)]))
	}
	home.report(w, took, &f)
	for _, c := range children {
		failed = errors.Join(failed, c.kill())
	}
	if link != nil {
		link.close()
	}
	failed = errors.Join(failed, f.err, home.close())
	select {
	case err := <-home.wrong:
		failed = errors.Join(failed, err)
	default:
	}
	if o.out != "" {
		failed = errors.Join(failed, os.WriteFile(o.out, graph.svg(o.device), 0o666))
	}
	if n := home.made.Load(); o.rate > 0 && float64(n) < float64(o.rate)*took.Seconds() {
		failed = errors.Join(failed, fmt.Errorf("%d connections in %v, less than %d a second", n, took, o.rate))
	}
	if home.tooManyExcuses() {
		failed = errors.Join(failed, fmt.Errorf("%d connections were given up after Close, or failed where others were", home.excuses.taken()))
	}
	if names := home.missing(); len(names) > 0 && failed == nil {
		failed = fmt.Errorf("no connection of these kinds: %s", strings.Join(names, ", "))
	}
	return errors.Join(failed, settled(sw, o, snapshot, before, w))
}

// held counts the things of the process that must be given back.
type held struct {
	rss, registered int64
	live, rdma      string
}

func state(sw *verbstest.Switch, device string) held {
	debug.FreeOSMemory()
	h := held{rss: resident(), registered: sw.RegisteredBytes(), live: fmt.Sprint(sw.Live())}
	if device != "iwarp" {
		out, _ := exec.Command("rdma", "resource").Output()
		h.rdma = string(out)
	}
	return h
}

// settled waits until all counts are as they were before.
func settled(sw *verbstest.Switch, o options, snapshot *leaktest.Snapshot, before held, w *os.File) error {
	var errs []error
	var now held
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		errs = errs[:0]
		now = state(sw, o.device)
		if now.registered > before.registered || now.live != before.live {
			errs = append(errs, fmt.Errorf(defect.Prefix+"leak: %s, %d bytes registered; before: %s, %d", now.live, now.registered, before.live, before.registered))
		}
		if now.rdma != before.rdma {
			errs = append(errs, fmt.Errorf(defect.Prefix+"leak: in the kernel: %s; before: %s", now.rdma, before.rdma))
		}
		if now.rss > before.rss+o.rss {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			errs = append(errs, fmt.Errorf("%d MiB resident, before %d; of Go: heap %d in use, %d kept, stacks %d, other %d",
				now.rss>>20, before.rss>>20, m.HeapInuse>>20, (m.HeapIdle-m.HeapReleased)>>20, m.StackSys>>20,
				(m.MSpanSys+m.MCacheSys+m.BuckHashSys+m.GCSys+m.OtherSys)>>20))
		}
		if len(errs) == 0 || time.Now().After(end) {
			break
		}
	}
	if left := snapshot.Left(10 * time.Second); len(left) > 0 {
		errs = append(errs, fmt.Errorf(defect.Prefix+"leak: %d goroutines or descriptors, the first: %s", len(left), left[0]))
	}
	if file := os.Getenv("RDMANET_SOAK_HEAP"); file != "" {
		if f, err := os.Create(file); err == nil {
			_ = pprof.WriteHeapProfile(f)
			_ = f.Close()
		}
	}
	fmt.Fprintf(w, "end: %d MiB resident, before %d; %d bytes registered, before %d\n", now.rss>>20, before.rss>>20, now.registered, before.registered)
	return errors.Join(errs...)
}

func within(d time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}

// faults causes the faults that connections must tolerate.
type faults struct {
	o        options
	home     *end
	sw       *verbstest.Switch
	children []*child
	rnd      *rand.Rand
	kills    int
	refused  int // refused counts the times at which memory or descriptors were refused for a while.
	err      error
}

func (f *faults) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(200+f.rnd.IntN(800)) * time.Millisecond):
		}
		var err error
		switch n := f.rnd.IntN(8); {
		case n < 4 && len(f.children) > 0:
			c := f.children[f.rnd.IntN(len(f.children))]
			err = c.kill()
			f.kills++
			// There may be no descriptor for a pipe, or no peer for the only address.
			for try := 0; ; try++ {
				e := c.start(f.o, f.home.ln.Addr().String())
				if e == nil || try == 20 || errors.Is(e, errPeer) {
					err = errors.Join(err, e)
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
		case n < 6:
			f.disturb(func() { f.sw.LimitMemory(max(1, f.sw.RegisteredBytes())) }, func() { f.sw.LimitMemory(0) })
		case n < 7:
			var old syscall.Rlimit
			if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old) == nil {
				low := syscall.Rlimit{Cur: uint64(descriptors()) + 4, Max: old.Max}
				f.disturb(func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low) }, func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old) })
			}
		default:
			f.home.overflow(ctx)
		}
		if err != nil {
			f.err = err
			f.home.fail(err)
			return
		}
	}
}

// disturb disturbs the process for a while. What fails meanwhile has a reason to.
func (f *faults) disturb(begin, end func()) {
	f.refused++
	f.home.disturbance.Add(1)
	begin()
	time.Sleep(time.Duration(20+f.rnd.IntN(200)) * time.Millisecond)
	end()
	f.home.disturbance.Add(1)
}
