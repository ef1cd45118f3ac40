package twin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// A Machine describes where programs run.
type Machine struct {
	Host     string       // Host is the address of both ends.
	Device   string       // Device is rdmanet.Config.Device.
	Provider ibv.Provider // Provider is for the peers that are not rdmanet.
	Linked   bool         // Linked is set if there can be a Link between the ends.
	Slow     bool         // Slow is set if the device is emulated.
	Noise    *Noise
}

// conn has the methods that the connections of both networks have.
type conn interface {
	net.Conn
	io.ReaderFrom
	io.WriterTo
	CloseRead() error
	CloseWrite() error
}

const (
	meetTime  = 200 * time.Millisecond // meetTime is how long lanes wait for each other.
	awaitTime = 500 * time.Millisecond // awaitTime is how long they wait for bytes.
	hangTime  = 20 * time.Second       // hangTime is how long after Close a call that does not return counts as hanging.
)

// run is a program while it runs.
type run struct {
	*recorder
	p       *Program
	m       *Machine
	network string
	ends    [2]*end // ends are those in this process.
	link    *link
	meets   *meetings
	moved   atomic.Int64 // moved changes whenever something happens.
	resting atomic.Int64 // resting counts the lanes that pause.
	closing sync.WaitGroup
	over    chan struct{}

	suspended []Span        // suspended has the times for which the second end's process was stopped.
	late      time.Duration // late is how late its goroutines ran.
}

// A player is an end that is connected, in this process or in another one.
type player interface {
	play()      // play runs the lanes, and returns when the end is closed or its process has ended.
	close(Lane) // close closes the end.
	drop()      // drop closes the end of a run that did not begin.
}

// end is one end of a run.
type end struct {
	*run
	i       int
	spec    *End
	conn    conn
	sent    stream // sent is what this end writes.
	wanted  stream // wanted is what it reads.
	taken   atomic.Int64
	read    atomic.Int64
	readAll chan struct{} // readAll is closed when the reading lane is done.
	through chan struct{} // through is closed when the writing lane has done its operations.
	wrote   chan struct{} // wrote is closed when the writing lane is done.
	closed  chan struct{} // closed is closed when Close has begun.
	once    sync.Once
}

func (r *run) newEnd(i int, c conn) *end {
	e := &end{run: r, i: i, spec: r.p.end(i), conn: c, sent: newStream(r.p.Seed, i), wanted: newStream(r.p.Seed, 1-i),
		readAll: make(chan struct{}), through: make(chan struct{}), wrote: make(chan struct{}), closed: make(chan struct{})}
	r.ends[i] = e
	return e
}

func newRun(m *Machine, p *Program, network string) *run {
	return &run{recorder: &recorder{}, p: p, m: m, network: network, over: make(chan struct{}), meets: newMeetings(p)}
}

// Run runs a program over "tcp" or "rdma".
func Run(m *Machine, p *Program, network string) *Trace {
	// The link is a proxy, so kernels of this host answer each other on either side of it. Only
	// on Linux the software device asks them.
	answered := network == "tcp" || m.Linked && runtime.GOOS == "linux"
	held := network == "tcp" || answered && p.First.Setup.TransferSize <= 0 && p.Other.Setup.TransferSize <= 0 && p.Peer == Rdmanet
	t := &Trace{Network: network, Slow: m.Slow && network == "rdma", Answered: answered, Held: held}
	began := time.Now()
	r := newRun(m, p, network)
	players, err := r.connect()
	if err != nil {
		t.Failed, t.Duration = err.Error(), time.Since(began)
		if r.link != nil {
			r.link.close()
		}
		return t
	}
	r.start = time.Now()
	if r.link != nil {
		r.link.begin(r.start)
	}
	var lanes sync.WaitGroup
	for _, e := range players {
		lanes.Go(e.play)
	}
	done := make(chan struct{})
	go func() {
		lanes.Wait()
		r.closing.Wait() // watch adds to it only while a lane hangs.
		close(done)
	}()
	r.watch(t, done, players)
	t.Duration = r.now()
	if r.link != nil {
		t.Link = r.link.faults()
		r.link.close()
	}
	if t.Hang != "" { // The end of the link may have ended the hang.
		select {
		case <-done:
		case <-time.After(hangTime):
			t.Hang += "\nand not after the link was reset either"
		}
	}
	r.mu.Lock()
	t.Calls = append([]Call(nil), r.calls...)
	r.mu.Unlock()
	if q, ok := players[1].(*process); ok {
		t.Died = q.end()
		t.Suspended = r.suspended
	}
	t.Noise = max(m.Noise.Since(began), r.late)
	return t
}

// stall returns how long nothing may move.
func (r *run) stall() time.Duration {
	d := 12 * time.Second
	switch {
	case r.p.Link.frozen():
		d = 1200 * time.Millisecond
		for i := range r.ends {
			if s := r.p.end(i).Setup; s.KeepAlive != 0 {
				d = max(d, s.silence()+1500*time.Millisecond)
			}
		}
	case r.network == "tcp":
		d = 3 * time.Second
	case r.m.Slow:
		d = time.Minute
	}
	return d
}

// watch waits for the lanes. When nothing moves any more, it closes both ends.
func (r *run) watch(t *Trace, done chan struct{}, players [2]player) {
	defer close(r.over)
	limit := r.stall()
	last, since := int64(-1), time.Now()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		now := r.moved.Load()
		if r.link != nil {
			now += r.link.carried.Load() / 4096 // Keep-alive alone does not count.
		}
		if now != last || r.resting.Load() > 0 {
			last, since = now, time.Now()
		}
		if time.Since(since) > limit {
			break
		}
	}
	t.GaveUp = r.now()
	r.closing.Add(len(players))
	for _, e := range players {
		go func() {
			defer r.closing.Done()
			e.close(Closing)
		}()
	}
	select {
	case <-done:
	case <-time.After(hangTime):
		buf := make([]byte, 1<<20)
		t.Hang = string(buf[:runtime.Stack(buf, true)])
		if p, ok := players[1].(*process); ok {
			p.cmd.Process.Kill()
		}
	}
}

// connect makes the connection, and the link between its ends.
func (r *run) connect() ([2]player, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	first, other := 0, 1 // first listens, and other dials.
	if !r.p.Swap {
		first, other = 1, 0
	}
	for attempt := 0; ; attempt++ {
		c, err := r.connectOnce(ctx, first, other)
		if err == nil || attempt == 4 || !r.portTaken(err) {
			return c, err
		}
		if r.link != nil {
			r.link.close()
			r.link = nil
		}
	}
}

// portTaken reports whether the port that a plain peer's device chose is in use. That
// happens on siw once in thousands of connections. A Dialer of rdmanet takes another port
// by itself.
func (r *run) portTaken(err error) bool {
	return r.network == "rdma" && r.m.Device != iwarp.Name && errors.Is(err, errno.EADDRNOTAVAIL)
}

func (r *run) connectOnce(ctx context.Context, listens, dials int) (players [2]player, err error) {
	ln, err := r.listenOwn(ctx, listens)
	if err != nil {
		return players, err
	}
	defer ln.close()
	target := ln.addr
	if r.m.Linked && !r.p.Link.direct() {
		if r.link, err = newLink(r.p.Link, target); err != nil {
			return players, err
		}
		target = r.link.addr()
	}
	type result struct {
		e   player
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		e, err := ln.accept()
		accepted <- result{e, err}
	}()
	e, err := r.dialOwn(ctx, dials, target)
	if err != nil {
		ln.close()
		if a := <-accepted; a.err == nil {
			a.e.drop()
		}
		return players, fmt.Errorf("dial: %w", err)
	}
	players[dials] = e
	select {
	case a := <-accepted:
		if a.err != nil {
			e.drop()
			return players, fmt.Errorf("accept: %w", a.err)
		}
		players[listens] = a.e
	case <-ctx.Done():
		e.drop()
		ln.close()
		if a := <-accepted; a.err == nil {
			a.e.drop()
		}
		return players, fmt.Errorf("accept: %w", ctx.Err())
	}
	return players, nil
}

// listenOwn has an end listen in its own process.
func (r *run) listenOwn(ctx context.Context, i int) (*listener, error) {
	if r.p.Apart && i == 1 {
		return r.listenApart(ctx)
	}
	return r.listen(ctx, i)
}

// dialOwn has an end dial in its own process.
func (r *run) dialOwn(ctx context.Context, i int, target string) (player, error) {
	if r.p.Apart && i == 1 {
		return r.dialApart(ctx, target)
	}
	return r.dial(ctx, i, target)
}

// listener is a listener of any network.
type listener struct {
	addr   string
	accept func() (player, error)
	close  func() error
}

func (r *run) listen(ctx context.Context, i int) (*listener, error) {
	if r.network == "rdma" && i == 1 && r.p.Peer != Rdmanet {
		return r.listenPlain(ctx)
	}
	var ln net.Listener
	var err error
	local := net.JoinHostPort(r.m.Host, "0")
	if r.network == "tcp" {
		ln, err = net.Listen("tcp4", "127.0.0.1:0")
	} else {
		lc := rdmanet.ListenConfig{Config: r.p.end(i).Setup.config(r.m.Device)}
		ln, err = lc.Listen(ctx, "rdma4", local)
	}
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return &listener{
		addr: ln.Addr().String(),
		accept: func() (player, error) {
			c, err := ln.Accept()
			if err != nil {
				return nil, err
			}
			return r.newEnd(i, c.(conn)), nil
		},
		close: ln.Close,
	}, nil
}

func (r *run) dial(ctx context.Context, i int, target string) (player, error) {
	switch {
	case r.network == "tcp":
		c, err := net.Dial("tcp4", target)
		if err != nil {
			return nil, err
		}
		return r.newEnd(i, c.(conn)), nil
	case i == 1 && r.p.Peer != Rdmanet:
		at, err := netip.ParseAddrPort(target)
		if err != nil {
			return nil, err
		}
		return r.dialPlain(ctx, at)
	}
	d := rdmanet.Dialer{Config: r.p.end(i).Setup.config(r.m.Device)}
	c, err := d.DialContext(ctx, "rdma4", target)
	if err != nil {
		return nil, err
	}
	return r.newEnd(i, c.(conn)), nil
}

// play runs the three lanes, then closes the end.
func (e *end) play() {
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(e.wrote)
		l := e.lane(Writing, e.spec.Writing)
		l.run()
		close(e.through)
		l.endWriting()
	})
	wg.Go(func() {
		defer close(e.readAll)
		l := e.lane(Reading, e.spec.Reading)
		if l.run() {
			l.endReading()
		}
	})
	wg.Go(func() { e.lane(Control, e.spec.Control).run() })
	wg.Wait()
	if !e.isClosed() {
		e.close(Closing)
	}
}

func (e *end) isClosed() bool {
	select {
	case <-e.closed:
		return true
	default:
		return false
	}
}

func (e *end) close(lane Lane) {
	c := Call{End: e.i, Lane: lane, Do: Close, Start: e.now()}
	e.server.begins(c)
	e.once.Do(func() { close(e.closed) })
	err := e.conn.Close()
	e.add(c, err)
	e.moved.Add(1)
}

func (e *end) drop() { e.conn.Close() }

// lane runs a list of operations.
type lane struct {
	*end
	which Lane
	ops   []Op
	meets []int // meets has the meetings that are still to come.
	fatal int   // fatal counts the calls that have failed for good.
}

func (e *end) lane(which Lane, ops []Op) *lane {
	l := &lane{end: e, which: which, ops: ops}
	for _, op := range ops {
		if op.Do == Meet {
			l.meets = append(l.meets, op.Size)
		}
	}
	return l
}

// run does all operations, or those before the connection was found to be unusable. It
// reports whether the connection is usable.
func (l *lane) run() bool {
	defer func() {
		for _, id := range l.meets {
			l.run3meets().come(id)
		}
	}()
	for _, op := range l.ops {
		select {
		case <-l.over:
			return false
		default:
		}
		l.do(op)
		l.moved.Add(1)
		if l.fatal > 1 { // One more call shows whether the error stays.
			return false
		}
	}
	return l.fatal == 0
}

func (l *lane) run3meets() *meetings { return l.end.run.meets }

// rest waits for that time, or until the run is over.
func (l *lane) rest(d time.Duration, until <-chan struct{}) {
	l.rests(1)
	defer l.rests(-1)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.over:
	case <-until:
	}
}

// rests changes the number of lanes that pause.
func (r *run) rests(by int64) {
	r.resting.Add(by)
	if r.server != nil {
		r.server.tell(notice{Rests: by})
	}
}

// await waits for a while until a counter has reached a value.
func (l *lane) await(counter *atomic.Int64, n int64) {
	l.rests(1)
	defer l.rests(-1)
	for end := time.Now().Add(awaitTime); counter.Load() < n && time.Now().Before(end) && !l.isClosed(); {
		time.Sleep(500 * time.Microsecond)
	}
}

func (l *lane) do(op Op) {
	switch {
	case op.Do.writes():
		l.write(op)
		return
	case op.Do.reads():
		l.receive(op)
		return
	}
	switch op.Do {
	case Pause:
		l.rest(op.Wait, nil)
	case Meet:
		if len(l.meets) > 0 && l.meets[0] == op.Size {
			l.meets = l.meets[1:]
		}
		l.rest(meetTime, l.run3meets().come(op.Size))
	case AwaitTaken:
		l.await(&l.taken, int64(op.Size))
	case AwaitRead:
		l.await(&l.read, int64(op.Size))
	case AwaitWrote:
		l.awaitLane(l.through)
	case AwaitEnd:
		l.awaitLane(l.readAll)
	case SetRead:
		l.deadline(op, l.conn.SetReadDeadline)
	case SetWrite:
		l.deadline(op, l.conn.SetWriteDeadline)
	case SetBoth:
		l.deadline(op, l.conn.SetDeadline)
	case ClearRead:
		l.clear(op.Do, l.conn.SetReadDeadline)
	case ClearWrite:
		l.clear(op.Do, l.conn.SetWriteDeadline)
	case CloseWrite:
		l.call(op.Do, l.conn.CloseWrite)
	case CloseRead:
		l.call(op.Do, l.conn.CloseRead)
	case Close:
		l.end.close(l.which)
	case Exit:
		l.exit()
	}
}

// awaitLane waits until another lane has done something. If that never happens, nothing moves.
func (l *lane) awaitLane(done chan struct{}) {
	select {
	case <-done:
	case <-l.closed:
	case <-l.over:
	}
}

// exit ends the process.
func (l *lane) exit() {
	c := Call{End: l.i, Lane: l.which, Do: Exit, Start: l.now()}
	c.Return = c.Start
	l.server.exit(c)
}

func (l *lane) call(do Kind, f func() error) Class {
	c := Call{End: l.i, Lane: l.which, Do: do, Start: l.now()}
	l.server.begins(c)
	class := l.add(c, f())
	l.moved.Add(1)
	return class
}

func (l *lane) deadline(op Op, set func(time.Time) error) {
	due := time.Now().Add(op.Wait)
	c := Call{End: l.i, Lane: l.which, Do: op.Do, Start: l.now(), Due: due.Sub(l.recorder.start)}
	l.add(c, set(due))
}

func (l *lane) clear(do Kind, set func(time.Time) error) {
	c := Call{End: l.i, Lane: l.which, Do: do, Start: l.now()}
	l.add(c, set(time.Time{}))
}

// meetings are the points at which several lanes meet.
type meetings struct {
	mu   sync.Mutex
	left map[int]int // left is how many lanes are still to come.
	all  map[int]chan struct{}
}

func newMeetings(p *Program) *meetings {
	m := &meetings{left: make(map[int]int), all: make(map[int]chan struct{})}
	for _, l := range p.lanes() {
		for _, op := range *l {
			if op.Do == Meet {
				m.left[op.Size]++
				m.all[op.Size] = make(chan struct{})
			}
		}
	}
	return m
}

// come notes that a lane has come to a meeting. It returns the channel that is closed when
// all have come.
func (m *meetings) come(id int) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left[id]--; m.left[id] == 0 {
		close(m.all[id])
	}
	return m.all[id]
}

var errEnough = errors.New("enough was read")
