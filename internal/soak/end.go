//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet"
)

// end is home, or a peer.
type end struct {
	cfg     rdmanet.Config
	ln      net.Listener
	packets net.PacketConn // packets is nil if the device has no datagrams.
	peer    bool
	seed    atomic.Uint64
	addr    string

	made, open, failures atomic.Int64           // made counts connections that have done their work.
	byKind               [numKinds]atomic.Int64 // byKind counts the same by kind.
	disturbance          atomic.Int64           // disturbance is odd while something is refused.
	arrivals             arrivals
	excuses              excuses
	wrong                chan error
	wg                   sync.WaitGroup
}

func newEnd(cfg rdmanet.Config, addr string, seed uint64) (*end, error) {
	e := &end{cfg: cfg, addr: addr, wrong: make(chan error, 100)}
	e.seed.Store(seed)
	var err error
	if e.ln, err = (&rdmanet.ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", net.JoinHostPort(addr, "0")); err != nil {
		return nil, err
	}
	udp := cfg
	if cfg.Provider.Attr().UDPSockets {
		udp.Provider, udp.Device = nil, "iwarp"
	}
	e.packets, err = (&rdmanet.ListenConfig{Config: udp}).ListenPacket(context.Background(), "udp", net.JoinHostPort(addr, "0"))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return nil, errors.Join(err, e.ln.Close())
	}
	e.wg.Go(func() {
		for {
			c, err := e.ln.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					e.fail(err)
				}
				return
			}
			e.wg.Go(func() { e.serve(c.(*rdmanet.Conn)) })
		}
	})
	if err == nil {
		e.wg.Go(func() {
			b := make([]byte, 2048)
			for {
				n, from, err := e.packets.ReadFrom(b)
				if errors.Is(err, net.ErrClosed) {
					return
				} else if err == nil {
					_, _ = e.packets.WriteTo(b[:n], from)
				}
			}
		})
	} else {
		e.packets = nil
	}
	return e, nil
}

func (e *end) packetAddr() string {
	if e.packets == nil {
		return "-"
	}
	return e.packets.LocalAddr().String()
}

func (e *end) fail(err error) {
	select {
	case e.wrong <- err:
	default:
	}
}

func (e *end) close() error {
	err := e.ln.Close()
	if e.packets != nil {
		err = errors.Join(err, e.packets.Close())
	}
	if !within(2*time.Minute, e.wg.Wait) {
		err = errors.Join(err, errors.New("connections that were accepted do not end"))
	}
	return err
}

// missing returns the kinds of which no connection was made, although home could have made
// one.
func (e *end) missing() (names []string) {
	for k := range numKinds {
		if e.possible(k, target{packet: e.packetAddr()}) && e.byKind[k].Load() == 0 {
			names = append(names, kindNames[k])
		}
	}
	return names
}

// overflow dials a listener that does not accept more often than the listener has room.
func (e *end) overflow(ctx context.Context) {
	ln, err := (&rdmanet.ListenConfig{Config: e.cfg, Backlog: 2}).Listen(ctx, "rdma", net.JoinHostPort(e.addr, "0"))
	if err != nil {
		return
	}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			c, err := (&rdmanet.Dialer{Config: e.cfg, Timeout: 2 * time.Second}).Dial("rdma", ln.Addr().String())
			if err != nil {
				return
			}
			e.made.Add(1)
			_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
			_, _ = c.Read(make([]byte, 1))
			_ = c.Close()
		})
	}
	all.Wait()
	_ = ln.Close()
}

// report prints a line.
func (e *end) report(w *os.File, at time.Duration, f *faults) {
	n := e.made.Load()
	var kinds []string
	for k, name := range kindNames {
		kinds = append(kinds, fmt.Sprintf("%s %d", name, e.byKind[k].Load()))
	}
	fmt.Fprintf(w, "%v: %d connections (%.0f/s), %d open, %d failed besides, %d peers killed, %d refusals, %d excused, %d MiB resident, %d descriptors; %s\n",
		at.Round(time.Second), n, float64(n)/at.Seconds(), e.open.Load(), e.failures.Load(), f.kills, f.refused, e.excuses.taken(), resident()>>20, descriptors(), strings.Join(kinds, ", "))
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// warmUp makes a connection of each kind, one after the other.
func warmUp(cfg rdmanet.Config, addr string) error {
	e, err := newEnd(cfg, addr, 1)
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // There are no pauses.
	var errs []error
	for k := range numKinds {
		if !e.possible(k, target{packet: e.packetAddr()}) {
			continue
		}
		err := e.active(ctx, target{stream: e.ln.Addr().String(), packet: e.packetAddr(), own: true}, header{Kind: k, Seed: 1, N: 40}, rnd)
		if err != nil && !errors.Is(err, errDropped) {
			errs = append(errs, fmt.Errorf("%s: %w", kindNames[k], err))
		}
	}
	return errors.Join(append(errs, e.close())...)
}
