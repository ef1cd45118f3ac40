package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/udconn"
)

// packetFaulty is a fixed scenario on a device that may fail: one that listens and
// answers, one that is connected and asks until it has its answers. Datagrams may be
// lost, and an error of one call says nothing of the next, so both go on.
func packetFaulty(cfg Config, fab packetNet) (errs []error, bad error) {
	var mu sync.Mutex
	failed := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
		var op *net.OpError
		if !errors.As(err, &op) && bad == nil {
			bad = fmt.Errorf("not an OpError: %w", err)
		}
	}
	p, err := (&ListenConfig{Config: cfg}).ListenPacket(tctx, fab.network, fab.address)
	if err != nil {
		failed(err)
		return errs, bad
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer p.Close()
	wg.Go(func() {
		b := make([]byte, 2000)
		for {
			n, from, err := p.ReadFrom(b)
			if err == nil {
				_, err = p.WriteTo(b[:n], from)
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				failed(err)
			}
		}
	})
	c, err := (&Dialer{Config: cfg, Timeout: patience}).Dial(fab.network, p.LocalAddr().String())
	if err != nil {
		failed(err)
		return errs, bad
	}
	b := make([]byte, 2000)
	for i := range 10 {
		msg := pattern(uint64(i), 60*i)
		answered := eventually(func() bool {
			if _, err := c.Write(msg); err != nil {
				failed(err)
			}
			for {
				c.SetReadDeadline(time.Now().Add(5 * time.Millisecond))
				n, err := c.Read(b)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					return false
				}
				if err != nil {
					failed(err)
				} else if string(b[:n]) == string(msg) {
					return true
				}
			}
		})
		if !answered {
			mu.Lock()
			bad = errors.Join(bad, fmt.Errorf("no answer to datagram %d", i))
			mu.Unlock()
			break
		}
	}
	if err := c.Close(); err != nil {
		failed(err)
	}
	return errs, bad
}

func packetFaults(t *testing.T, fault func(s *verbstest.Switch, n int) *verbstest.Fault) (felt int) {
	impatient(t)
	set(t, &packetBounds.Timeouts, []time.Duration{20 * time.Millisecond, patience})
	setDomainIdle(t, 0)
	pn := packetNet{network: "udp4", address: "127.0.0.1:0"}
	for n := 1; ; n++ {
		s := verbstest.NewSwitch(newFabric())
		f := fault(s, n)
		var errs []error
		var bad error
		within(t, fmt.Sprintf("fault %d", n), func() { errs, bad = packetFaulty(Config{Provider: s}, pn) })
		require.NoError(t, bad, "fault %d", n)
		if len(s.Live()) > 0 || s.RegisteredBytes() > 0 {
			defect.Leak(t, "fault %d left %v, %d bytes of registered memory", n, s.Live(), s.RegisteredBytes())
			t.FailNow()
		}
		if len(errs) > 0 {
			felt++
		}
		if !f.Fired() {
			require.Empty(t, errs, "without a fault")
			return felt
		}
		require.Less(t, n, 10000, "there is no end of calls")
	}
}

// Every call of every kind fails once. Nothing hangs or leaks, and after what was opened
// datagrams get through, by new objects if need be.
func TestPacketFaultsOfCalls(t *testing.T) {
	checkLeaks(t)
	fatal := []verbstest.Kind{verbstest.BindUD, verbstest.ResolveUD, verbstest.ListenUD, verbstest.QueryPort,
		verbstest.AllocPD, verbstest.CreateCQ, verbstest.RegMR, verbstest.CreateAH, verbstest.CreateQP, verbstest.Connect, verbstest.PostSend, verbstest.PostRecv}
	harmless := []verbstest.Kind{verbstest.ListenerAccept, verbstest.Accept, verbstest.Poll, verbstest.Arm, verbstest.Wait}
	for i, k := range append(fatal, harmless...) {
		t.Run(strings.ReplaceAll(k.String(), " ", ""), func(t *testing.T) {
			felt := packetFaults(t, func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailNth(n, nil, k) })
			if i < len(fatal) {
				require.NotZero(t, felt, "no fault was felt")
			}
		})
	}
}

// Every completion fails once.
func TestPacketFaultsOfCompletions(t *testing.T) {
	checkLeaks(t)
	for _, status := range []ibv.WCStatus{ibv.WCLocLenErr, ibv.WCLocProtErr, ibv.WCFlushErr, ibv.WCGeneralErr} {
		t.Run(status.String(), func(t *testing.T) {
			packetFaults(t, func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailCompletion(n, status) })
		})
	}
}

// Without memory that can be registered nothing is opened, and with little of it there are
// fewer receives.
func TestPacketLittleMemory(t *testing.T) {
	checkLeaks(t)
	for fail := 1; ; fail++ {
		s := newSwitch(t, newFabric())
		for n := range fail {
			s.FailNth(n+1, syscall.ENOMEM, verbstest.RegMR)
		}
		pn := packetNet{network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: s}}
		p, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, pn.network, pn.address)
		if err != nil {
			requirePacketError(t, err, "listen")
			require.ErrorIs(t, err, syscall.ENOBUFS)
			require.Greater(t, fail, 2)
			return
		}
		require.Less(t, p.(*PacketConn).Stats().Receives, udconn.ReceiveSlots)
		pingPong(t, pn.dial(t, p.LocalAddr()), p.(*PacketConn))
		require.NoError(t, p.Close())
	}
}
