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
	"time"
)

// A process runs the second end of a program that is Apart. The two processes send each other
// values as JSON.
type process struct {
	*run
	cmd    *exec.Cmd
	in     io.Closer
	orders *json.Encoder // orders go to the process through in.
	news   *json.Decoder // news come from it.
	output strings.Builder
	begun  []Call // begun has the calls that send and have not returned.
	rests  int64  // rests is how many of its lanes pause.
	mu     sync.Mutex
	over   bool // over is set when the process has ended.
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
	Done    bool   // Done is set when it is closed. The process waits for the other end, because Close goes on behind it.
	Failed  string
	Begun   *Call // Begun is a call that sends and has begun.
	Call    *Call // Call is a call that has returned.
	Rests   int64 // Rests is by how much the number of lanes that pause has changed.
}

// processEnv makes a program that calls Serve the process of an end.
const processEnv = "RDMANET_TWIN_PROCESS"

// startProcess starts the process of the second end.
func (r *run) startProcess(target string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{run: r, cmd: exec.Command(exe)}
	// Otherwise the race detector has the lanes go on for a second when the process ends.
	p.cmd.Env = append(os.Environ(), processEnv+"=1", "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	p.cmd.Stderr = &p.output
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
	p.in, p.orders, p.news = in, json.NewEncoder(in), json.NewDecoder(out)
	m := *r.m
	m.Provider, m.Noise = nil, nil
	p.order(order{Task: &task{r.p, m, r.network, target}})
	return p, nil
}

// order tells the process something. One that has ended does not hear it.
func (p *process) order(o order) { _ = p.orders.Encode(o) }

// hear returns the next notice.
func (p *process) hear() (notice, error) {
	var n notice
	err := p.news.Decode(&n)
	if err == nil && n.Failed != "" {
		err = errors.New(n.Failed)
	}
	return n, err
}

// connected waits until the end is connected.
func (p *process) connected() (player, error) {
	n, err := p.hear()
	if err == nil && !n.Ready {
		err = fmt.Errorf("%+v", n)
	}
	if err != nil {
		p.drop()
		return nil, fmt.Errorf("the process of end 1: %w\n%s", err, p.output.String())
	}
	return p, nil
}

// drop ends the process.
func (p *process) drop() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// play has the process run its lanes, and records what it reports.
func (p *process) play() {
	p.order(order{Start: shared(p.start)})
	faults := p.suspend()
	defer close(faults)
	for {
		n, err := p.hear()
		if n.Done {
			return
		}
		if err != nil {
			break
		}
		p.note(n)
	}
	// The process has ended.
	p.resting.Add(-p.rests)
	for _, c := range p.begun {
		c.Return, c.Class, c.More = p.recorder.now(), Ended, c.Asked
		p.put(c)
	}
}

// end has the process end, and returns how it ended if that was its own fault.
func (p *process) end() string {
	p.in.Close()
	p.mu.Lock()
	p.over = true // It does not stand still any more.
	p.mu.Unlock()
	if err := p.cmd.Wait(); err != nil {
		return fmt.Sprintf("%v\n%s", err, p.output.String())
	}
	return ""
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

// suspend stops the process for a while, as the program's faults say. The channel that it returns
// ends that.
func (p *process) suspend() chan struct{} {
	over := make(chan struct{})
	for _, f := range p.p.Link.Faults {
		if f.process() {
			go p.suspendAt(f, over)
		}
	}
	return over
}

func (p *process) suspendAt(f Fault, over chan struct{}) {
	select {
	case <-over:
		return
	case <-time.After(f.At - p.now()):
	}
	p.resting.Add(1)
	defer p.resting.Add(-1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || stop(p.cmd.Process) != nil {
		return
	}
	e := Event{f, p.now()}
	time.Sleep(f.For)
	_ = resume(p.cmd.Process)
	e.For = p.now() - e.When
	p.suspended = append(p.suspended, e)
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

// Serve runs the end of another process's program, and ends the process. In a process that is not
// for that it returns at once.
func Serve() {
	if os.Getenv(processEnv) == "" {
		return
	}
	s := &server{orders: json.NewDecoder(os.Stdin), reports: json.NewEncoder(os.Stdout)}
	if err := s.serve(); err != nil {
		s.tell(notice{Failed: err.Error()})
	}
	os.Exit(0)
}

// A server runs the end in the process for it.
type server struct {
	orders *json.Decoder

	mu      sync.Mutex
	reports *json.Encoder
}

// tell reports something. It has left the process when tell returns.
func (s *server) tell(n notice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reports.Encode(n) != nil {
		os.Exit(1) // The other process has ended.
	}
}

// begins reports that a call that sends has begun.
func (s *server) begins(c Call) {
	if s != nil {
		s.tell(notice{Begun: &c})
	}
}

// exit reports the call that ends the process, and ends it. Nothing is reported behind that.
func (s *server) exit(c Call) {
	s.mu.Lock()
	_ = s.reports.Encode(notice{Call: &c})
	os.Exit(0)
}

func (s *server) serve() error {
	var o order
	if err := s.orders.Decode(&o); err != nil {
		return err
	}
	t := o.Task
	r := &run{recorder: &recorder{server: s}, p: t.Program, m: &t.Machine, network: t.Network, over: make(chan struct{}), meets: newMeetings(t.Program)}
	e, err := r.connectEnd(s, t.Target)
	if err != nil {
		return err
	}
	s.tell(notice{Ready: true})
	if err := s.orders.Decode(&o); err != nil {
		return err
	}
	r.start = time.Now()
	r.start = r.start.Add(o.Start - shared(r.start))
	go s.obey(r, e)
	e.play()
	s.tell(notice{Done: true})
	select {} // obey ends the process.
}

// obey closes the end when the other process says so. If a call does not return after that, the
// stacks say where it is. When there are no orders any more, the process ends.
func (s *server) obey(r *run, e player) {
	defer os.Exit(0)
	var o order
	if s.orders.Decode(&o) != nil {
		return
	}
	close(r.over)
	time.AfterFunc(hangTime*3/4, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "hangs:\n%s", buf[:runtime.Stack(buf, true)])
	})
	e.close(Closing)
	_ = s.orders.Decode(&o) // It ends with the input.
}

// connectEnd makes the second end, in its own process.
func (r *run) connectEnd(s *server, target string) (player, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if target != "" {
		return r.dial(ctx, 1, target)
	}
	ln, err := r.listen(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer ln.close()
	s.tell(notice{Address: ln.addr})
	return ln.accept()
}
