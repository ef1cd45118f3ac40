package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/udconn"
	"github.com/rdmanet/rdmanet/internal/udpeer"
)

// set changes a variable for as long as the test runs. PacketConns are opened behind it.
func set[T any](t testing.TB, v *T, to T) {
	old := *v
	*v = to
	t.Cleanup(func() { *v = old })
}

// impatient makes peers be looked for often.
func impatient(t testing.TB) {
	set(t, &packetBounds.MinSilence, 20*time.Millisecond)
	set(t, &packetBounds.MaxSilence, 40*time.Millisecond)
	set(t, &packetBounds.FailurePause, 20*time.Millisecond)
	set(t, &packetBounds.SuspicionPause, 10*time.Millisecond)
}

// onFabric runs f over the fabric.
func onFabric(t *testing.T, f func(t *testing.T, pn packetNet)) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if pn.fabric != nil {
			f(t, pn)
		}
	})
}

// until has write send datagrams until one arrives at p.
func until(t testing.TB, p *PacketConn, write func() error) (got []byte, from netip.AddrPort) {
	t.Helper()
	b := make([]byte, 5000)
	require.True(t, eventually(func() bool {
		if err := write(); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
		p.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		n, addr, err := p.ReadFromUDPAddrPort(b)
		if err == nil {
			got, from = b[:n], addr
		} else {
			requireTimeout(t, err)
		}
		return err == nil
	}), "nothing arrives")
	return got, from
}

// A server that is started anew has another queue pair, and its client finds it although
// it sends nothing by itself.
func TestPacketServerRestarts(t *testing.T) {
	impatient(t)
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		connected := pn.dial(t, server.LocalAddr())
		client := pn.listen(t)
		for round := range 3 {
			at := addrPort(server.LocalAddr())
			require.NoError(t, server.Close())
			server = pn.listenAt(t, at.String())
			msg := []byte(fmt.Sprintf("round %d", round))
			until(t, server, func() error {
				_, err := client.WriteToUDPAddrPort(msg, at)
				return err
			})
			// The other is told, too, if it has looked while nobody was there.
			until(t, server, func() error {
				_, err := connected.Write(msg)
				return err
			})
		}
	})
}

// A client that is started anew, at the same port, gets the answers to what it asks.
func TestPacketClientRestarts(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		client := pn.listen(t)
		for range 5 {
			_, err := client.WriteTo([]byte("ping"), server.LocalAddr())
			require.NoError(t, err)
			_, from := readFrom(t, server)
			require.Equal(t, addrPort(client.LocalAddr()), from)
			_, err = server.WriteToUDPAddrPort([]byte("pong"), from)
			require.NoError(t, err)
			got, _ := readFrom(t, client)
			defect.Bytes(t, "pong", got)
			at := client.LocalAddr().String()
			require.NoError(t, client.Close())
			client = pn.listenAt(t, at)
			if pn.overVerbs() {
				time.Sleep(2 * time.Millisecond)
			}
		}
	})
}

// An address that nobody serves: a write says so once it is known, and the address is
// found when somebody does.
func TestPacketNobodyThere(t *testing.T) {
	set(t, &packetBounds.FailurePause, 50*time.Millisecond)
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if !pn.overVerbs() {
			return // UDP tells a connected one only, see TestPacketConnectedPeerGone
		}
		free := pn.listen(t)
		to := free.LocalAddr()
		require.NoError(t, free.Close())
		p := pn.listen(t)
		_, err := p.WriteTo([]byte("lost"), to)
		require.NoError(t, err)
		require.True(t, eventually(func() bool {
			_, err = p.WriteTo([]byte("lost"), to)
			return err != nil
		}))
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		s := p.Stats()
		require.Positive(t, s.Unsent)
		require.Positive(t, s.ResolutionFailures)

		late := pn.listenAt(t, to.String())
		until(t, late, func() error {
			_, err := p.WriteTo([]byte("hello"), to)
			return err
		})
		_, err = (&Dialer{Config: pn.cfg, Timeout: patience}).Dial(pn.network, "["+addrPort(to).Addr().String()+"]:1")
		requirePacketError(t, err, "dial")
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
	})
}

// The peer of a connected one goes: Read and Write say ECONNREFUSED, over UDP and verbs.
func TestPacketConnectedPeerGone(t *testing.T) {
	impatient(t)
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		at := server.LocalAddr().String()
		require.NoError(t, server.Close())
		failed := make(chan error, 1)
		go func() {
			_, err := client.Read(make([]byte, 10))
			failed <- err
		}()
		within(t, "Read", func() {
			for {
				select {
				case err := <-failed:
					requirePacketError(t, err, "read")
					require.ErrorIs(t, err, syscall.ECONNREFUSED)
					return
				default:
					client.Write([]byte("anybody there?"))
					time.Sleep(time.Millisecond)
				}
			}
		})
		server = pn.listenAt(t, at)
		until(t, server, func() error {
			_, err := client.Write([]byte("hello"))
			return err
		})
	})
}

// While one address is being resolved, which takes long, others are sent to; what was
// written meanwhile arrives in order, and no more of it than is kept.
func TestPacketResolvingHoldsUpNobody(t *testing.T) {
	set(t, &packetBounds.Timeouts, slices.Repeat([]time.Duration{20 * time.Millisecond}, 1000))
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		_, err := server.WriteTo([]byte("known"), client.LocalAddr())
		require.NoError(t, err)
		readFrom(t, client)
		slow := pn.listen(t)
		pn.fabric.Mute(true)
		for i := range packetBounds.Waiting + 3 {
			_, err := server.WriteTo([]byte{byte(i)}, slow.LocalAddr())
			require.NoError(t, err)
			_, err = server.WriteTo([]byte{byte(i)}, client.LocalAddr())
			require.NoError(t, err)
			got, _ := readFrom(t, client)
			require.Equal(t, []byte{byte(i)}, got)
		}
		require.EqualValues(t, 3, server.Stats().Unsent)
		pn.fabric.Mute(false)
		for i := range packetBounds.Waiting {
			got, from := readFrom(t, slow)
			require.Equal(t, []byte{byte(i)}, got)
			require.Equal(t, addrPort(server.LocalAddr()), from)
		}
	})
}

// Nobody answers: writes fail with a timeout, and Close does not wait for it.
func TestPacketSilentHost(t *testing.T) {
	set(t, &packetBounds.FailurePause, time.Hour)
	onFabric(t, func(t *testing.T, pn packetNet) {
		set(t, &packetBounds.Timeouts, []time.Duration{50 * time.Millisecond, 50 * time.Millisecond})
		p, to := pn.listen(t), pn.listen(t).LocalAddr()
		pn.fabric.Mute(true)
		_, err := p.WriteTo([]byte("lost"), to)
		require.NoError(t, err)
		require.True(t, eventually(func() bool {
			_, err = p.WriteTo([]byte("lost"), to)
			return err != nil
		}))
		requirePacketError(t, err, "write")
		requireTimeout(t, err)
		require.EqualValues(t, 2, pn.fabric.Asked())

		packetBounds.Timeouts = []time.Duration{time.Hour}
		q := pn.listen(t)
		_, err = q.WriteTo([]byte("lost"), to)
		require.NoError(t, err)
		within(t, "Close", func() { require.NoError(t, q.Close()) })
		require.EqualValues(t, 1, q.Stats().Unsent)
	})
}

// Who writes to many addresses that nobody answers for keeps the ways to those that are
// there, and bounds the rest.
func TestPacketKeepsWays(t *testing.T) {
	set(t, &packetBounds.Peers, 8)
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		var clients []*PacketConn
		for range packetBounds.Peers / 2 {
			client := pn.listen(t)
			clients = append(clients, client)
			_, err := server.WriteTo([]byte("hello"), client.LocalAddr())
			require.NoError(t, err)
			readFrom(t, client)
		}
		pn.fabric.Mute(true)
		host := addrPort(clients[0].LocalAddr()).Addr()
		const flood = 100
		for i := range flood {
			_, err := server.WriteToUDPAddrPort([]byte("answer"), netip.AddrPortFrom(host, uint16(1000+i)))
			require.NoError(t, err)
		}
		require.LessOrEqual(t, server.Stats().Peers, packetBounds.Peers)
		require.GreaterOrEqual(t, server.Stats().Unsent, uint64(flood-packetBounds.Peers/2)) // the others wait for an answer
		for _, client := range clients {
			_, err := server.WriteTo([]byte("still there"), client.LocalAddr())
			require.NoError(t, err)
			got, _ := readFrom(t, client)
			defect.Bytes(t, "still there", got)
		}
	})
}

// A full send queue holds the writer up, who notices deadlines and Close; what was taken
// is sent in order.
func TestPacketQueueFull(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.LingerTimeout = -1
		client, server := pn.pair(t)
		pn.fabric.Stall(true)
		taken := 0
		stalled := make(chan error, 1)
		go func() {
			for {
				if _, err := client.Write([]byte(strconv.Itoa(taken))); err != nil {
					stalled <- err
					return
				}
				taken++
			}
		}()
		require.True(t, eventually(func() bool { return client.Stats().QueueStalls > 0 }))
		client.SetWriteDeadline(time.Now().Add(5 * time.Millisecond))
		err := <-stalled
		requirePacketError(t, err, "write")
		requireTimeout(t, err)
		require.LessOrEqual(t, taken, udconn.SendSlots)

		const writers = 3
		errs := make(chan error, writers)
		client.SetWriteDeadline(time.Time{})
		for range writers {
			go func() {
				_, err := client.Write([]byte("more"))
				errs <- err
			}()
		}
		pn.fabric.Stall(false)
		for i := range taken {
			got, _ := readFrom(t, server)
			require.Equal(t, strconv.Itoa(i), string(got))
		}
		for range writers {
			require.NoError(t, <-errs)
			got, _ := readFrom(t, server)
			defect.Bytes(t, "more", got)
		}

		pn.fabric.Stall(true)
		closed := make(chan error, writers)
		for range writers {
			go func() {
				var err error
				for err == nil {
					_, err = client.Write([]byte("too late"))
				}
				closed <- err
			}()
		}
		time.Sleep(time.Millisecond)
		within(t, "Close", func() { require.NoError(t, client.Close()) })
		for range writers {
			err := <-closed
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, net.ErrClosed)
		}
		pn.fabric.Stall(false)
	})
}

// The port's MTU falls: what is too long for it now is refused.
func TestPacketMTUFalls(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		pn.fabric.SetMTU(256)
		_, err := client.Write(make([]byte, 257))
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EMSGSIZE)
		_, err = client.Write(make([]byte, 256))
		require.NoError(t, err)
		got, _ := readFrom(t, server)
		require.Len(t, got, 256)
	})
}

// A queue pair that fails is replaced, and found again by its peers.
func TestPacketQueuePairFails(t *testing.T) {
	impatient(t)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for _, p := range []*PacketConn{server, client} {
			require.NoError(t, pn.fabric.Break(p.Info()[0].QPN))
			until(t, server, func() error {
				_, err := client.Write([]byte("still there?"))
				if errors.Is(err, ibv.WCFlushErr) {
					err = nil
				}
				return err
			})
			until(t, client, func() error {
				_, err := server.WriteTo([]byte("yes"), client.LocalAddr())
				if errors.Is(err, ibv.WCFlushErr) {
					err = nil
				}
				return err
			})
		}
	})
}

// The device goes: reading says so.
func TestPacketDeviceRemoved(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		pn.fabric.Remove()
		for _, p := range []*PacketConn{client, server} {
			p.SetReadDeadline(time.Now().Add(patience))
			_, _, err := p.ReadFrom(make([]byte, 10))
			requirePacketError(t, err, "read")
			require.ErrorIs(t, err, syscall.ENODEV)
			require.True(t, eventually(func() bool { return p.Stats().Receives == 0 }))
		}
		_, err := server.WriteTo([]byte("x"), client.LocalAddr())
		if err == nil {
			require.True(t, eventually(func() bool {
				_, err = server.WriteTo([]byte("x"), client.LocalAddr())
				return err != nil
			}))
		}
		requirePacketError(t, err, "write")
	})
}

// Where both devices serve, each peer is reached by the one that it has: one that has
// RDMA by that, one that has not by UDP, at the same port.
func TestPacketBothDevices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		set(t, &packetBounds.TimeoutsBesideUDP, []time.Duration{patience}) // who is there answers in time
		soft := iwarp.New(iwarp.Config{})
		local := netip.MustParseAddrPort(pn.address)
		server := pn.listenBoth(t, soft, local)
		defer server.Close()
		require.Len(t, server.Info(), 2)
		require.Equal(t, fabricMTU, server.MaxDatagramSize())

		byRDMA := pn.dial(t, server.LocalAddr())
		plain, err := net.Dial(pn.network, server.LocalAddr().String()) // not even rdmanet
		require.NoError(t, err)
		defer plain.Close()
		for range 3 {
			pingPong(t, byRDMA, server)
			_, err = plain.Write([]byte("ping"))
			require.NoError(t, err)
			got, from := readFrom(t, server)
			defect.Bytes(t, "ping", got)
			require.Equal(t, addrPort(plain.LocalAddr()), from)
			_, err = server.WriteToUDPAddrPort([]byte("pong"), from)
			require.NoError(t, err)
			plain.SetReadDeadline(time.Now().Add(patience))
			var b [10]byte
			n, err := plain.Read(b[:])
			require.NoError(t, err)
			defect.Bytes(t, "pong", b[:n])
		}
		batch := datagrams(1, 7, addrPort(byRDMA.LocalAddr())) // for both
		readers := slices.Repeat([]net.Conn{byRDMA}, len(batch))
		for _, i := range []int{2, 3, 6} {
			batch[i].Addr, readers[i] = addrPort(plain.LocalAddr()), plain
		}
		n, err := server.WriteBatch(batch)
		require.NoError(t, err)
		require.Equal(t, len(batch), n)
		for i, d := range batch {
			b := make([]byte, 1000)
			readers[i].SetReadDeadline(time.Now().Add(patience))
			n, err := readers[i].Read(b)
			require.NoError(t, err)
			require.Equal(t, d.Buf, b[:n])
		}
		require.EqualValues(t, 1, server.Stats().Resolutions, "who comes by UDP is answered by UDP")

		// And unasked: who cannot be resolved gets it by UDP.
		packetBounds.TimeoutsBesideUDP = []time.Duration{50 * time.Millisecond}
		hasty := pn.listenBoth(t, soft, local)
		defer hasty.Close()
		silent, err := net.ListenPacket(pn.network, pn.address)
		require.NoError(t, err)
		defer silent.Close()
		for i := range 3 {
			_, err = hasty.WriteTo([]byte{byte(i)}, silent.LocalAddr())
			require.NoError(t, err)
		}
		silent.SetReadDeadline(time.Now().Add(patience))
		for i := range 3 {
			var b [10]byte
			n, _, err := silent.ReadFrom(b[:])
			require.NoError(t, err)
			require.Equal(t, []byte{byte(i)}, b[:n])
		}
		require.Zero(t, server.Stats().Unsent+hasty.Stats().Unsent)

		// A reader that waits for one device hears the other.
		for _, write := range []func([]byte) (int, error){plain.Write, byRDMA.Write, plain.Write} {
			got := make(chan string)
			go func() {
				var b [10]byte
				n, _, err := server.ReadFrom(b[:])
				got <- fmt.Sprint(string(b[:n]), err)
			}()
			time.Sleep(time.Millisecond)
			_, err := write([]byte("x"))
			require.NoError(t, err)
			within(t, "Read", func() { require.Equal(t, "x<nil>", <-got) })
		}
		require.NoError(t, server.Close())
	})
}

// listenBoth opens one on the fabric and on the software device. It cannot do so by the public
// functions: Config.Provider names one device, and without it the first one would be real.
func (pn packetNet) listenBoth(t testing.TB, soft ibv.Provider, local netip.AddrPort) *PacketConn {
	t.Helper()
	c, err := bindPacket(tctx, &pn.cfg, []ibv.Provider{pn.cfg.Provider, soft}, local, netip.Addr{})
	require.NoError(t, err)
	return newPacketConn(&pn.cfg, c)
}

// A peer that is not rdmanet asks for us and sends, and is answered, although it cannot be
// asked for itself. Before it has asked it is nobody.
func TestPacketPlainPeerAsks(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if !pn.overVerbs() {
			return // TestPacketBothDevices has a plain UDP peer
		}
		server := pn.listen(t)
		at := addrPort(server.LocalAddr())
		e := udpeer.New(t, pn.cfg.Provider, at.Addr())
		defer e.Close()
		port := e.Ask(at)
		from := netip.AddrPortFrom(at.Addr(), port)
		for i := range 3 {
			msg := fmt.Sprint("ping ", i)
			wr := e.WR(msg)
			if i > 0 { // as udaddy has it
				wr.Op, wr.Imm = ibv.OpSendImm, e.QP.QPN()
			}
			e.Post(wr)
			got, addr := readFrom(t, server)
			defect.Bytes(t, msg, got)
			require.Equal(t, from, addr)
			e.Expect()
			_, err := server.WriteToUDPAddrPort([]byte(msg), addr)
			require.NoError(t, err)
			wc := e.Next()
			defect.Bytes(t, msg, e.Payload(&wc))
			require.Equal(t, e.To.QPN, wc.Imm, "what udaddy takes for the queue pair's number")
		}

		stranger := udpeer.New(t, pn.cfg.Provider, at.Addr())
		defer stranger.Close()
		stranger.Send(e.To)
		stranger.Post(stranger.WR("who am I?"))
		require.True(t, eventually(func() bool { return server.Stats().Strays == 1 }))
	})
}

// A peer that is not rdmanet is asked for, and its answers are told from others'.
func TestPacketPlainPeerAnswers(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if !pn.overVerbs() {
			return
		}
		p := pn.cfg.Provider
		ip := netip.MustParseAddrPort(pn.address).Addr()
		ln, err := p.ListenUD(tctx, netip.AddrPortFrom(ip, 0), 0)
		require.NoError(t, err)
		defer ln.Close()
		e := udpeer.New(t, p, ip)
		defer e.Close()
		for i := range 4 {
			e.Expect()
			client := pn.listen(t)
			_, err = client.WriteTo([]byte("ping"), udpAddr(ln.Addr()))
			require.NoError(t, err)
			id, err := ln.Accept(tctx)
			require.NoError(t, err)
			require.NoError(t, id.Accept(tctx, ibv.ConnParam{QPN: e.QP.QPN()}))
			require.NoError(t, id.Close())
			wc := e.Next()
			require.Equal(t, "ping", e.Payload(&wc))
			require.Equal(t, wc.SrcQP, wc.Imm)
			e.Answer(&wc)
			msg := fmt.Sprint("pong ", i)
			e.Post(e.WR(msg))
			got, from := readFrom(t, client)
			defect.Bytes(t, msg, got)
			require.Equal(t, ln.Addr(), from)
			require.NoError(t, client.Close())
		}
	})
}
