package twin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A process runs the second end of a program that is Apart, and is a player. The two processes
// send each other values as JSON. server.go has what that process does.
type process struct {
	*run
	cmd     *exec.Cmd
	in      io.Closer
	orders  *json.Encoder   // orders go to the process through in.
	notices *json.Decoder   // notices come from it.
	output  strings.Builder // output is what it prints, which is only looked at when it has ended.
	ready   atomic.Bool     // ready is set when its end is connected.
	begun   []Call          // begun has the calls that send and have not returned.
	rests   int64           // rests is how many of its lanes pause.
	fault   error           // fault is why it has ended or must be ended, if it was not told to.

	mu   sync.Mutex
	over bool // over is set when the process is not to be stopped any more.
}

// An order tells the process what to do.
type order struct {
	Task  *task
	Start time.Duration // Start has the lanes begin. Their times count from this one, by the clock of both processes.
	Close bool          // Close has the process close its end, because nothing moves.
}

// A task is what the process runs.
type task struct {
	Program *Program
	Machine Machine
	Network string
	Target  string // Target is where the end dials to. If it is empty, the end listens.
}

// A notice is what the process has to say.
type notice struct {
	Address string // Address is where the end listens.
	Ready   bool   // Ready is set when it is connected.
	Failed  string
	Begun   *Call // Begun is a call that sends and has begun.
	Call    *Call // Call is a call that has returned.
	Rests   int64 // Rests is by how much the number of lanes that pause has changed.

	// Done is set when the end is closed. The process waits for the other end, because what Close
	// has begun goes on.
	Done  bool
	Noise time.Duration // Noise is how late the goroutines of the process ran, at the end.
}

// processEnv makes a program that calls Serve the process of an end.
const processEnv = "RDMANET_TWIN_PROCESS"

// startProcess starts the process of the second end. It is ended with ctx if it is not connected
// by then.
func (r *run) startProcess(ctx context.Context, target string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{run: r, cmd: exec.Command(exe)}
	p.cmd.Env = append(os.Environ(), processEnv+"=1", fmt.Sprint("GOMAXPROCS=", runtime.GOMAXPROCS(0)),
		// Otherwise the race detector has the lanes go on for a second when the process ends.
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	p.cmd.Stderr = &p.output
	p.cmd.SysProcAttr = ownGroup()
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.in, p.orders, p.notices = in, json.NewEncoder(in), json.NewDecoder(out)
	context.AfterFunc(ctx, p.giveUp)
	m := *r.m
	m.Provider, m.Noise = nil, nil
	p.order(order{Task: &task{r.p, m, r.network, target}})
	return p, nil
}

// listenApart has the second end listen.
func (r *run) listenApart(ctx context.Context) (*listener, error) {
	p, err := r.startProcess(ctx, "")
	if err != nil {
		return nil, err
	}
	n, err := p.hear()
	if err != nil {
		return nil, p.failed(err)
	}
	return &listener{addr: n.Address, accept: p.connected, close: func() error { p.giveUp(); return nil }}, nil
}

// dialApart has the second end dial.
func (r *run) dialApart(ctx context.Context, target string) (player, error) {
	p, err := r.startProcess(ctx, target)
	if err != nil {
		return nil, err
	}
	return p.connected()
}

// connected waits until the end is connected.
func (p *process) connected() (player, error) {
	if _, err := p.hear(); err != nil {
		return nil, p.failed(err)
	}
	p.ready.Store(true)
	return p, nil
}

// failed ends a process that could not be connected, and returns the reason.
func (p *process) failed(err error) error {
	p.drop()
	return fmt.Errorf("the process of end 1: %w\n%s", err, p.output.String())
}

// giveUp ends a process that is not connected.
func (p *process) giveUp() {
	if !p.ready.Load() {
		p.cmd.Process.Kill()
	}
}

func (p *process) drop() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// order tells the process something. One that has ended does not hear it.
func (p *process) order(o order) { _ = p.orders.Encode(o) }

// hear returns the next notice.
func (p *process) hear() (notice, error) {
	var n notice
	err := p.notices.Decode(&n)
	if err == nil && n.Failed != "" {
		err = errors.New(n.Failed)
	}
	return n, err
}

// play has the process run its lanes, and records what it reports.
func (p *process) play() {
	p.order(order{Start: shared(p.start)})
	over := make(chan struct{})
	defer close(over)
	for _, s := range p.p.Suspends {
		go p.suspend(s, over)
	}
	exits := false
	for {
		n, err := p.hear()
		switch {
		case err == nil && n.Done:
			if len(p.p.Suspends) == 0 { // Otherwise that is most of it.
				p.late = n.Noise
			}
			return
		case err == nil:
			exits = exits || n.Call != nil && n.Call.Do == Exit
			p.note(n)
			continue
		case err != io.EOF:
			p.fault = err
			p.cmd.Process.Kill()
		case !exits:
			p.fault = errors.New("has ended without being told to")
		}
		break
	}
	p.resting.Add(-p.rests)
	for _, c := range p.begun {
		c.Return, c.Class, c.More = p.recorder.now(), Ended, c.Asked
		p.put(c)
	}
}

func (p *process) note(n notice) {
	switch {
	case n.Begun != nil:
		p.begun = append(p.begun, *n.Begun)
	case n.Call != nil:
		if i := slices.IndexFunc(p.begun, func(c Call) bool { return c.Lane == n.Call.Lane && c.Do == n.Call.Do }); i >= 0 {
			p.begun = slices.Delete(p.begun, i, i+1)
		}
		p.put(*n.Call)
	}
	p.rests += n.Rests
	p.resting.Add(n.Rests)
	p.moved.Add(1)
}

func (p *process) close(Lane) { p.order(order{Close: true}) }

// suspend stops the process for a while, unless over is closed before.
func (p *process) suspend(s Span, over chan struct{}) {
	select {
	case <-over:
		return
	case <-time.After(s.At - p.now()):
	}
	p.resting.Add(1)
	defer p.resting.Add(-1)
	p.mu.Lock()
	defer p.mu.Unlock()
	began := p.now()
	if p.over || stop(p.cmd.Process) != nil {
		return
	}
	time.Sleep(s.For)
	_ = resume(p.cmd.Process)
	p.suspended = append(p.suspended, Span{began, p.now() - began})
}

// end has the process end, and returns how it ended if that was its own fault.
func (p *process) end() string {
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.in.Close()
	err := p.cmd.Wait()
	if p.fault != nil {
		err = errors.Join(p.fault, err)
	}
	if err != nil {
		return fmt.Sprintf("%v\n%s", err, p.output.String())
	}
	return ""
}

// shared returns when a moment was by the clock that both processes read. Another program may get
// the processor between two looks at clocks, so the closest of some is taken.
func shared(t time.Time) (at time.Duration) {
	best := never
	for range 100 {
		before := monotonic()
		since := time.Since(t)
		if took := monotonic() - before; took < best {
			best, at = took, before-since
		}
	}
	return at
}
