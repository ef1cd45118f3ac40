package iwarp

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

const defaultBacklog = 1024

// listener implements ibv.Listener. A TCP connection is half open until its MPA Request has
// arrived. The number of half-open connections is bounded, and a new one replaces the
// oldest. So silent peers cannot keep others out. Requests then wait for Accept in a queue.
// While the queue is full, further requests are rejected.
type listener struct {
	dev  *device
	ln   net.Listener
	addr netip.AddrPort

	ready  chan *id
	done   chan struct{}
	closed sync.Once
	wg     sync.WaitGroup

	mu   sync.Mutex
	half list.List // half has a net.Conn for each half-open connection, oldest first.
}

// Listen binds a TCP listener.
func (p *Provider) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	ln, err := listenTCP(ctx, local)
	if err != nil {
		return nil, err
	}
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	l := &listener{dev: p.dev, ln: ln, addr: unmapped(ln.Addr()),
		ready: make(chan *id, backlog), done: make(chan struct{})}
	if !local.Addr().IsValid() {
		l.addr = netip.AddrPortFrom(netip.IPv6Unspecified(), l.addr.Port())
	}
	l.dev.meeting.hold()
	l.wg.Add(1)
	go l.run()
	return l, nil
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

// run accepts TCP connections.
func (l *listener) run() {
	defer l.wg.Done()
	backoff := time.Millisecond
	for {
		conn, err := l.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// There are no descriptors, most likely. So run waits before it tries again.
			select {
			case <-time.After(backoff):
			case <-l.done:
				return
			}
			backoff = min(2*backoff, time.Second)
			continue
		}
		backoff = time.Millisecond
		e := l.admit(conn)
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			l.respond(conn, e)
		}()
	}
}

// admit adds a connection to the half-open ones.
func (l *listener) admit(conn net.Conn) *list.Element {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.half.Len() >= l.dev.cfg.MaxHalfOpen {
		oldest := l.half.Front()
		l.half.Remove(oldest).(net.Conn).Close()
	}
	select {
	case <-l.done: // Close may have ended the others before.
		conn.Close()
	default:
	}
	return l.half.PushBack(conn)
}

// settle removes a connection from the half-open ones.
func (l *listener) settle(e *list.Element) {
	l.mu.Lock()
	l.half.Remove(e) // This does nothing if the connection was replaced.
	l.mu.Unlock()
}

// respond is the passive side of MPA start-up, up to the decision.
func (l *listener) respond(conn net.Conn, e *list.Element) {
	conn.SetDeadline(time.Now().Add(l.dev.cfg.RequestTimeout))
	req, err := readStart(conn, false)
	l.settle(e)
	if err != nil {
		conn.Close()
		return
	}
	if req.Markers {
		rejectStart(conn, &req, nil)
		return
	}
	conn.SetDeadline(time.Time{})
	private, offer, ok := iwarpwire.CutSameHostOffer(req.Private)
	i := &id{dev: l.dev, passive: true, conn: conn, request: req, private: private,
		local: unmapped(conn.LocalAddr()), remote: unmapped(conn.RemoteAddr())}
	i.param = ibv.ConnParam{ResponderResources: depth(req.ORD, req.Enhanced), InitiatorDepth: depth(req.IRD, req.Enhanced)}
	if ok {
		i.offer = &offer
	}
	if l.dev.cfg.SameHost == SameHostRequire && l.dev.matchShared(conn, i.offer) != nil {
		rejectStart(conn, &req, nil)
		return
	}
	select {
	case l.ready <- i:
	default: // The program does not accept, and the queue is full.
		rejectStart(conn, &req, nil)
	}
}

// depth returns the peer's proposal, as a limit of this side.
func depth(d uint16, enhanced bool) int {
	if !enhanced || d == iwarpwire.DepthNotNegotiated {
		return maxRdAtom
	}
	return min(int(d), maxRdAtom)
}

func (l *listener) Accept(ctx context.Context) (ibv.ID, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case i := <-l.ready:
		return i, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *listener) Close() error {
	err := net.ErrClosed
	l.closed.Do(func() {
		close(l.done)
		err = l.ln.Close()
		l.mu.Lock()
		for e := l.half.Front(); e != nil; e = e.Next() {
			e.Value.(net.Conn).Close()
		}
		l.mu.Unlock()
		l.wg.Wait()
		l.dev.meeting.release()
		for {
			select {
			case i := <-l.ready:
				i.Reject(nil)
			default:
				return
			}
		}
	})
	return err
}
