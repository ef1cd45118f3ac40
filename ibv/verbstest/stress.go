package verbstest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

var stressTests = []subtest{
	{"FullDuplex", testFullDuplex},
	{"ConcurrentPosts", testConcurrentPosts},
	{"ManyConnections", testManyConnections},
}

// testFullDuplex streams messages both ways at once and looks at every byte.
func testFullDuplex(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	a, b := newStream(t, p.Active, p.Passive), newStream(t, p.Passive, p.Active)
	together(t, a.send, a.receive, b.send, b.receive)
}

// A stream is one direction of testFullDuplex.
type stream struct {
	from, to *End
	src, dst *Mem
	credit   chan struct{} // receives that are posted and not spent
}

const (
	streamMessages = 10000
	streamWindow   = 16  // sends and receives at a time
	streamSlot     = 640 // bytes
)

func newStream(t testing.TB, from, to *End) *stream {
	t.Helper()
	s := &stream{
		from: from, to: to,
		src:    from.Register(t, make([]byte, streamWindow*streamSlot), 0),
		dst:    to.Register(t, make([]byte, streamWindow*streamSlot), localWrite),
		credit: make(chan struct{}, streamWindow),
	}
	for i := range uint64(streamWindow) {
		must(t, "post", s.post(i))
	}
	return s
}

// post posts the receive for message i.
func (s *stream) post(i uint64) error {
	slot := int(i%streamWindow) * streamSlot
	if _, err := s.to.QP.PostRecv([]ibv.RecvWR{{ID: i, SGL: s.dst.SGL(slot, streamSlot, 1)}}); err != nil {
		return err
	}
	s.credit <- struct{}{}
	return nil
}

// message writes message i into buf and returns it.
func (s *stream) message(buf []byte, i uint64) []byte {
	buf = buf[:8+int(i*7919%(streamSlot-8))]
	binary.BigEndian.PutUint64(buf, i)
	for j := range buf[8:] {
		buf[8+j] = byte(i) + byte(j)*3
	}
	return buf
}

func (s *stream) send(stop <-chan struct{}) error {
	for i := range uint64(streamMessages) {
		if i >= streamWindow {
			if _, err := expect(s.from.SendCQ, i-streamWindow); err != nil {
				return err
			}
		}
		select {
		case <-s.credit:
		case <-stop:
			return nil
		}
		slot := int(i%streamWindow) * streamSlot
		msg := s.message(s.src.Buf[slot:][:streamSlot], i)
		_, err := s.from.QP.PostSend([]ibv.SendWR{{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled,
			SGL: s.src.SGL(slot, len(msg), 1)}})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) receive(<-chan struct{}) error {
	want := make([]byte, streamSlot)
	for i := range uint64(streamMessages) {
		wc, err := expect(s.to.RecvCQ, i)
		if err != nil {
			return err
		}
		slot := int(i%streamWindow) * streamSlot
		if err := defect.Differ(s.message(want, i), s.dst.Buf[slot:][:wc.ByteLen]); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
		if i+streamWindow < streamMessages {
			if err := s.post(i + streamWindow); err != nil {
				return err
			}
		}
	}
	return nil
}

// testConcurrentPosts has several goroutines post chains to one queue pair. The
// chains arrive whole, and those of each goroutine in order.
func testConcurrentPosts(t *testing.T, env Env) {
	const posters, chains, chainLen, slots, slot = 4, 150, 4, 8, 16
	p := NewPair(t, env, PairConfig{SendWR: slots * chainLen, RecvWR: slots * chainLen})
	src := p.Active.Register(t, make([]byte, slots*chainLen*slot), 0)
	dst := p.Passive.Register(t, make([]byte, slots*chainLen*slot), localWrite)

	// A free slot is room for one chain in the source memory and the send queue,
	// a credit is one chain of receives.
	free := make(chan int, slots)
	credit := make(chan struct{}, slots)
	receives := func(s int) error {
		var wrs []ibv.RecvWR
		for i := range chainLen {
			wrs = append(wrs, ibv.RecvWR{SGL: dst.SGL((s*chainLen+i)*slot, slot, 1)})
		}
		_, err := p.Passive.QP.PostRecv(wrs)
		credit <- struct{}{}
		return err
	}
	for s := range slots {
		free <- s
		must(t, "PostRecv", receives(s))
	}
	poster := func(who int) func(<-chan struct{}) error {
		return func(stop <-chan struct{}) error {
			for c := range chains {
				var s int
				select {
				case <-credit:
				case <-stop:
					return nil
				}
				select {
				case s = <-free:
				case <-stop:
					return nil
				}
				var wrs []ibv.SendWR
				for i := range chainLen {
					at := (s*chainLen + i) * slot
					binary.BigEndian.PutUint32(src.Buf[at:], uint32(who))
					binary.BigEndian.PutUint32(src.Buf[at+4:], uint32(c))
					binary.BigEndian.PutUint32(src.Buf[at+8:], uint32(i))
					wrs = append(wrs, ibv.SendWR{ID: uint64(s), Op: ibv.OpSend, SGL: src.SGL(at, slot, 1)})
				}
				wrs[chainLen-1].Flags = ibv.SendSignaled
				if _, err := p.Active.QP.PostSend(wrs); err != nil {
					return err
				}
			}
			return nil
		}
	}
	run := []func(<-chan struct{}) error{
		func(<-chan struct{}) error {
			for range posters * chains {
				wc, err := await(p.Active.SendCQ)
				if err != nil || wc.Status != ibv.WCSuccess {
					return errors.Join(err, wc.Status)
				}
				free <- int(wc.ID)
			}
			return nil
		},
		func(<-chan struct{}) error {
			var seen [posters]uint32
			for n := range posters * chains {
				s := n % slots
				var who uint32
				for i := range uint32(chainLen) {
					if _, err := expect(p.Passive.RecvCQ, 0); err != nil {
						return err
					}
					msg := dst.Buf[(s*chainLen+int(i))*slot:]
					w, c, k := binary.BigEndian.Uint32(msg), binary.BigEndian.Uint32(msg[4:]), binary.BigEndian.Uint32(msg[8:])
					if i == 0 {
						who = w
					}
					if w != who || w >= posters || c != seen[w] || k != i {
						return fmt.Errorf("goroutine %d, chain %d, request %d arrived out of turn", w, c, k)
					}
				}
				seen[who]++
				if err := receives(s); err != nil {
					return err
				}
			}
			return nil
		},
	}
	for who := range posters {
		run = append(run, poster(who))
	}
	together(t, run...)
}

// testManyConnections sets many connections up at once, through several
// acceptors, and uses each.
func testManyConnections(t *testing.T, env Env) {
	const n, acceptors = 50, 5
	cfg := PairConfig{SendWR: 4, RecvWR: 4, SharedCQ: true}
	l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), n)
	must(t, "Listen", err)
	t.Cleanup(func() { must(t, "Listener.Close", l.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()

	type result struct {
		end *End
		err error
	}
	dialled, accepted := make(chan result, n), make(chan result, n)
	for range n {
		go func() {
			e, err := env.active(ctx, l.Addr(), cfg)
			if err == nil {
				err = e.ID.Connect(ctx, e.param)
			}
			dialled <- result{e, err}
		}()
	}
	for range acceptors {
		go func() {
			for range n / acceptors {
				e, err := passive(ctx, l, cfg)
				if err == nil {
					err = e.accept(ctx)
				}
				accepted <- result{e, err}
			}
		}()
	}
	byAddr := make(map[netip.AddrPort]*End)
	var active []*End
	var errs []error
	for range n {
		a, p := <-dialled, <-accepted
		errs = append(errs, a.err, p.err)
		if a.end != nil {
			active = append(active, a.end.atEnd(t))
		}
		if p.end != nil {
			byAddr[p.end.atEnd(t).ID.RemoteAddr()] = p.end
		}
	}
	must(t, "set up", errors.Join(errs...))
	for i, a := range active {
		p := byAddr[a.ID.LocalAddr()]
		if p == nil {
			t.Fatalf("nobody accepted the connection from %v", a.ID.LocalAddr())
		}
		must(t, "first message", hello(a, p))
		a.transfer(t, p, pattern(100, i))
		p.transfer(t, a, pattern(100, i+n))
	}
}
