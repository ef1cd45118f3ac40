package rdmanet

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Listen announces on the local address. network is as for Dial, and address is host:port
// as for net.Listen. An empty host, 0.0.0.0 and :: all mean every address of the families
// that the network has. Port 0 means a free port. The listener is a *Listener.
func Listen(network, address string) (net.Listener, error) {
	return new(ListenConfig).Listen(context.Background(), network, address)
}

// ListenConfig holds options for listening. The zero value is what Listen uses.
type ListenConfig struct {
	Config

	// Backlog bounds the connections that are set up and wait for Accept. If as many wait,
	// further ones are refused at once. It also bounds the connections that are being set
	// up. If there is one more, the oldest of these is dropped. 0 means 1024.
	Backlog int
}

const defaultBacklog = 1024

// Listen announces on the local address; see the function Listen. ctx concerns
// the resolution of the address only.
func (lc *ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	l, addr, err := lc.listen(ctx, network, address)
	if err != nil {
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newListenerHandle(l), nil
}

func (lc *ListenConfig) listen(ctx context.Context, network, address string) (*listener, net.Addr, error) {
	n, err := parseNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	providers, local, err := lc.place(ctx, n, address)
	if err != nil {
		return nil, nil, err
	}
	backlog := lc.Backlog
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	l := &listener{cfg: lc.Config, backlog: backlog, ready: make(chan *conn, backlog), done: make(chan struct{}), failed: make(chan struct{})}
	l.due.timedOut = make(chan struct{})
	if err := l.bind(ctx, providers, local); err != nil {
		l.close()
		return nil, tcpAddr(local), err
	}
	for _, ln := range l.listeners {
		l.wg.Add(1)
		go l.run(ln)
	}
	return l, nil, nil
}

// place is where a listener listens: the devices and the address.
func (lc *ListenConfig) place(ctx context.Context, n network, address string) ([]ibv.Provider, netip.AddrPort, error) {
	if err := lc.check(); err != nil {
		return nil, netip.AddrPort{}, err
	}
	providers, err := lc.providers()
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	locals, err := resolve(ctx, net.DefaultResolver, n, address, true)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	return providers, preferred(locals), nil
}

// preferred returns the address of a name to listen on. As in package net, that is an IPv4
// address if there are both.
func preferred(locals []netip.AddrPort) netip.AddrPort {
	for _, a := range locals {
		if a.Addr().Is4() {
			return a
		}
	}
	return locals[0]
}

// portTries is how many ports are tried until one is free on all providers, or on the one
// that dials.
const portTries = 16

// onFreePort binds again if the port that was chosen is in use on some provider.
func onFreePort(local netip.AddrPort, bind func() error) error {
	for try := 1; ; try++ {
		err := bind()
		if err == nil || local.Port() != 0 || !inUse(err) || try == portTries {
			return err
		}
	}
}

// bind listens on every provider, on the same port. A provider without the address is left
// out if another provider has it.
func (l *listener) bind(ctx context.Context, providers []ibv.Provider, local netip.AddrPort) error {
	return onFreePort(local, func() error { return l.bindOnce(ctx, providers, local) })
}

func (l *listener) bindOnce(ctx context.Context, providers []ibv.Provider, local netip.AddrPort) error {
	var errs []error
	shared := false
	for _, p := range providers {
		ln, err := p.Listen(ctx, local, l.backlog)
		switch {
		case err == nil:
			l.listeners = append(l.listeners, ln)
			local = netip.AddrPortFrom(local.Addr(), ln.Addr().Port())
			l.addr = tcpAddr(ln.Addr())
			shared = shared || sharesTCPPorts(p)
		case inUse(err) && shared && sharesTCPPorts(p):
			// The port is that of an earlier provider, which serves these peers too.
		case inUse(err):
			for _, ln := range l.listeners {
				ln.Close()
			}
			l.listeners = nil
			return err
		default:
			errs = append(errs, err)
		}
	}
	if len(l.listeners) == 0 {
		return join(errs)
	}
	for _, err := range errs {
		l.cfg.log("does not listen", l.addr, err)
	}
	return nil
}

// Listener accepts connections. It implements net.Listener. All methods may be called by
// several goroutines at once.
//
// Connections are set up before Accept returns them. Each has Config.NegotiateTimeout for
// that, and they do not wait for each other. So a slow or silent peer delays no other peer.
//
// When the RDMA device of the address is removed, and the software device does not listen
// too, Accept fails with an error that matches syscall.ENODEV.
//
// Connections are set up before Accept, so an open Listener has goroutines: two for the
// software device, one for all devices of rdma-core together, and one for each connection
// that is being set up. A Listener that the program drops without Close is closed when the
// garbage collector finds it. Config.Logger receives a warning, or slog.Default() if that
// is nil.
type Listener struct {
	*listener
}

// Accept waits for the next connection, a *Conn.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptRDMA()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// AcceptRDMA is Accept with the concrete type.
func (l *Listener) AcceptRDMA() (*Conn, error) {
	c, err := l.accept()
	runtime.KeepAlive(l)
	if err != nil {
		return nil, opError("accept", nil, l.addr, err)
	}
	return newHandle(c), nil
}

// Addr returns the address, a *net.TCPAddr with the port that was chosen.
func (l *Listener) Addr() net.Addr {
	return l.addr
}

// SetDeadline bounds Accept, calls in progress too; a zero t is no bound.
func (l *Listener) SetDeadline(t time.Time) error {
	return opError("set", nil, l.addr, l.setDeadline(t))
}

// Close stops listening. It does not affect connections that were accepted, and resets
// those that were not. It waits for no peer.
func (l *Listener) Close() error {
	err := l.close()
	runtime.KeepAlive(l)
	return opError("close", nil, l.addr, err)
}

// listener is the object behind the handle Listener, as conn is behind Conn.
type listener struct {
	cfg       Config
	backlog   int
	addr      *net.TCPAddr
	listeners []ibv.Listener

	ready  chan *conn
	done   chan struct{}
	failed chan struct{} // failed is closed when no listener is left.
	closed sync.Once
	wg     sync.WaitGroup // wg counts the goroutines of run.

	mu   sync.Mutex
	over bool      // over is set when Close was called. Nothing joins ready any more.
	half list.List // half has a context.CancelFunc for each connection that is being set up, oldest first.
	due  acceptDeadline
	deaf int   // deaf is how many listeners have failed.
	err  error // err is the cause when all have failed.
}

// run takes connection requests.
func (l *listener) run(ln ibv.Listener) {
	defer l.wg.Done()
	ctx := context.Background()
	for {
		id, err := ln.Accept(ctx)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, errno.ENODEV):
			l.lost(err)
			return
		case err != nil:
			select { // There is nothing to do but to try again later.
			case <-time.After(10 * time.Millisecond):
			case <-l.done:
				return
			}
			continue
		}
		if len(l.ready) == cap(l.ready) { // The program does not accept.
			l.refuse(id)
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		e := l.admit(cancel)
		go func() {
			defer cancel()
			l.setUp(ctx, id, e)
		}()
	}
}

// lost notes that one of the listeners returns no more requests. Accept ends with the last
// one.
func (l *listener) lost(err error) {
	l.cfg.log("does not listen any more", l.addr, err)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.deaf++; l.deaf == len(l.listeners) {
		l.err = err
		close(l.failed)
	}
}

// refuse refuses a connection request for which there is no room.
func (l *listener) refuse(id ibv.ID) {
	l.cfg.log("refused", tcpAddr(id.RemoteAddr()), errBacklog)
	id.Reject(nil)
	id.Close()
}

var errBacklog = errors.New("as many connections as ListenConfig.Backlog says wait for Accept")

// admit adds a connection to those that are being set up.
func (l *listener) admit(cancel context.CancelFunc) *list.Element {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.half.Len() >= l.backlog {
		oldest := l.half.Front()
		l.half.Remove(oldest).(context.CancelFunc)()
	}
	if l.over { // Close has ended the others before.
		cancel()
	}
	return l.half.PushBack(cancel)
}

func (l *listener) setUp(ctx context.Context, id ibv.ID, e *list.Element) {
	remote := tcpAddr(id.RemoteAddr())
	c, err := accept(ctx, &l.cfg, id)
	var refusal error
	l.mu.Lock()
	l.half.Remove(e)
	switch {
	case err != nil:
	case l.over:
		refusal = net.ErrClosed
	default:
		select {
		case l.ready <- c:
		default: // Other connections have filled ready meanwhile.
			refusal = errBacklog
		}
	}
	l.mu.Unlock()
	switch {
	case err != nil:
		l.cfg.log("set-up failed", remote, err)
	case refusal != nil:
		l.cfg.log("reset", remote, refusal)
		c.abort()
	}
}

// accept waits for the next connection that has been set up.
func (l *listener) accept() (*conn, error) {
	for {
		timedOut, changed := l.due.watch()
		select {
		case <-l.done:
			return nil, net.ErrClosed
		case <-timedOut:
			return nil, os.ErrDeadlineExceeded
		default:
		}
		select {
		case c := <-l.ready:
			return c.markAccepted(), nil
		case <-l.done:
			return nil, net.ErrClosed
		case <-l.failed:
			select {
			case c := <-l.ready:
				return c.markAccepted(), nil
			default:
			}
			return nil, l.err
		case <-timedOut:
			return nil, os.ErrDeadlineExceeded
		case <-changed:
		}
	}
}

func (l *listener) setDeadline(t time.Time) error {
	select {
	case <-l.done:
		return net.ErrClosed
	default:
	}
	l.due.set(t)
	return nil
}

func (l *listener) close() error {
	err := net.ErrClosed
	l.closed.Do(func() {
		err = nil
		close(l.done)
		for _, ln := range l.listeners {
			err = errors.Join(err, ln.Close())
		}
		l.mu.Lock()
		l.over = true
		for e := l.half.Front(); e != nil; e = e.Next() {
			e.Value.(context.CancelFunc)()
		}
		l.mu.Unlock()
		l.wg.Wait()
		l.due.set(time.Time{})
		for len(l.ready) > 0 {
			select {
			case c := <-l.ready:
				go c.abort()
			default: // Accept has taken it meanwhile.
			}
		}
	})
	return err
}

// acceptDeadline is a deadline whose end is a closed channel, for select.
type acceptDeadline struct {
	mu       sync.Mutex
	timer    *time.Timer
	timedOut chan struct{} // timedOut is closed when the deadline has passed.
	changed  chan struct{} // changed is closed when a new deadline is set.
}

func (d *acceptDeadline) watch() (timedOut, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return d.timedOut, d.changed
}

func (d *acceptDeadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	timedOut := make(chan struct{})
	d.timedOut = timedOut
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
	switch wait := time.Until(t); {
	case t.IsZero():
	case wait <= 0:
		close(timedOut)
	default:
		d.timer = time.AfterFunc(wait, func() { close(timedOut) })
	}
}
