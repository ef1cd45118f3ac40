package rdmanet

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/udconn"
)

// datagrams is n datagrams of all sizes up to 500 bytes.
func datagrams(seed uint64, n int, to netip.AddrPort) []Datagram {
	ds := make([]Datagram, n)
	for i := range ds {
		ds[i] = Datagram{Buf: pattern(seed+uint64(i), i*37%501), Addr: to}
	}
	return ds
}

// emptyDatagrams is n datagrams to be read.
func emptyDatagrams(n, size int) []Datagram {
	ds := make([]Datagram, n)
	for i := range ds {
		ds[i].Buf = make([]byte, size)
	}
	return ds
}

// readBatch reads until it has as many datagrams as want has, and compares.
func readBatch(t testing.TB, p *PacketConn, want []Datagram, from netip.AddrPort) {
	t.Helper()
	require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
	ds := emptyDatagrams(50, 600)
	for got := 0; got < len(want); {
		n, err := p.ReadBatch(ds)
		require.NoError(t, err)
		require.NotZero(t, n)
		for _, d := range ds[:n] {
			require.Equal(t, from, d.Addr)
			require.Equal(t, want[got].Buf, d.Buf[:d.N], "datagram %d", got)
			got++
		}
	}
}

// Batches of any length, also of more than the send queue has room for, arrive whole
// and in order.
func TestPacketBatch(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		to, from := addrPort(server.LocalAddr()), addrPort(client.LocalAddr())
		before := client.Stats()
		sent, bytes := 0, 0
		for i, n := range []int{0, 1, 2, udconn.ChainLength - 1, udconn.ChainLength, udconn.ChainLength + 1, udconn.SendSlots + 1} {
			ds := datagrams(uint64(i), n, to)
			if i%2 == 0 {
				for i := range ds {
					ds[i].Addr = netip.AddrPort{}
				}
			}
			k, err := client.WriteBatch(ds)
			require.NoError(t, err)
			require.Equal(t, n, k)
			readBatch(t, server, ds, from)
			back := datagrams(uint64(i+100), n, from)
			k, err = server.WriteBatch(back)
			require.NoError(t, err)
			require.Equal(t, n, k)
			readBatch(t, client, back, to)
			sent += n
			for _, d := range ds {
				bytes += len(d.Buf)
			}
		}
		after := client.Stats()
		require.EqualValues(t, sent, after.DatagramsSent-before.DatagramsSent)
		require.EqualValues(t, sent, after.DatagramsReceived-before.DatagramsReceived)
		require.EqualValues(t, bytes, after.BytesSent-before.BytesSent)
		n, err := client.ReadBatch(nil)
		require.NoError(t, err)
		require.Zero(t, n)
	})
}

// A batch may be for many, of whom some are known and some are not.
func TestPacketBatchToMany(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		p := pn.listen(t)
		var peers []*PacketConn
		for range 4 {
			peers = append(peers, pn.listen(t))
		}
		for round := range 3 {
			var ds []Datagram
			want := make([][]Datagram, len(peers))
			for i := range packetBounds.Waiting {
				for j, peer := range peers[:len(peers)-2+round%3] {
					d := Datagram{Buf: pattern(uint64(round), i+j), Addr: addrPort(peer.LocalAddr())}
					ds, want[j] = append(ds, d), append(want[j], d)
				}
			}
			n, err := p.WriteBatch(ds)
			require.NoError(t, err)
			require.Equal(t, len(ds), n)
			for j, peer := range peers {
				readBatch(t, peer, want[j], addrPort(p.LocalAddr()))
			}
		}
		require.Zero(t, p.Stats().Unsent)
	})
}

// Those in front of a datagram that cannot be sent are sent; those behind it are not.
func TestPacketBatchErrors(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		to, from := addrPort(server.LocalAddr()), addrPort(client.LocalAddr())
		other := netip.AddrPortFrom(to.Addr(), to.Port()^1)
		for _, test := range []struct {
			d   Datagram
			err error
		}{
			{Datagram{Buf: make([]byte, client.MaxDatagramSize()+1)}, syscall.EMSGSIZE},
			{Datagram{Addr: other}, net.ErrWriteToConnected},
		} {
			ds := datagrams(1, 10, to)
			ds[7] = test.d
			n, err := client.WriteBatch(ds)
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, test.err)
			require.Equal(t, 7, n)
			readBatch(t, server, ds[:7], from)
			pingPong(t, client, server)
		}
		n, err := server.WriteBatch(make([]Datagram, 1))
		require.Zero(t, n)
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EDESTADDRREQ)

		small := emptyDatagrams(2, 4)
		_, err = client.WriteBatch([]Datagram{{Buf: []byte("0123456789")}})
		require.NoError(t, err)
		server.SetReadDeadline(time.Now().Add(patience))
		n, err = server.ReadBatch(small)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Equal(t, "0123", string(small[0].Buf[:small[0].N]))

		server.SetReadDeadline(past)
		n, err = server.ReadBatch(small)
		require.Zero(t, n)
		requirePacketError(t, err, "read")
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		client.SetWriteDeadline(past)
		n, err = client.WriteBatch(datagrams(1, 3, to))
		require.Zero(t, n)
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, client.Close())
		n, err = client.WriteBatch(datagrams(1, 3, to))
		require.Zero(t, n)
		require.ErrorIs(t, err, net.ErrClosed)
		n, err = client.ReadBatch(small)
		require.Zero(t, n)
		require.ErrorIs(t, err, net.ErrClosed)
	})
}

// A device that takes only the first few of a batch says so; nothing is sent twice or
// left out.
func TestPacketBatchPostFails(t *testing.T) {
	for _, cause := range []error{syscall.EIO, ibv.ErrQueueFull} {
		for good := range 4 {
			if cause == ibv.ErrQueueFull && good == 0 {
				continue // it would not be full
			}
			sw := newSwitch(t, newFabric())
			pn := packetNet{name: "fabric", network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: sw}}
			client, server := pn.pair(t)
			ds := datagrams(9, 10, netip.AddrPort{})
			sw.FailPost(1, verbstest.PostSend, good, cause)
			n, err := client.WriteBatch(ds)
			if cause == ibv.ErrQueueFull { // there is room again later
				require.NoError(t, err)
				require.Equal(t, len(ds), n)
			} else {
				requirePacketError(t, err, "write")
				require.ErrorIs(t, err, cause)
				require.Equal(t, good, n)
			}
			readBatch(t, server, ds[:n], addrPort(client.LocalAddr()))
			pingPong(t, client, server)
		}
	}
}

// A peer that may have moved is asked for before it gets its part of a batch, although the
// batch begins with one that has not, for whom there may be no room at once.
func TestPacketBatchDoubtsPeer(t *testing.T) {
	set(t, &packetBounds.SuspicionPause, 1) // The suspicion of a round is over in the next one.
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		server, steady, mover := pn.listen(t), pn.listen(t), pn.listen(t)
		greet := func(p *PacketConn) (from netip.AddrPort) {
			_, err := p.WriteTo([]byte("hello"), server.LocalAddr())
			require.NoError(t, err)
			_, from = readFrom(t, server)
			return from
		}
		for round := range 4 {
			there, away := greet(steady), greet(mover)
			ds := []Datagram{{Buf: []byte("to who stays"), Addr: there}, {Buf: []byte{}, Addr: there}, {Buf: []byte("to who moves"), Addr: away}}
			if round == 2 {
				pn.cfg.Provider.(*verbstest.Switch).FailPost(1, verbstest.PostSend, 1, ibv.ErrQueueFull)
			}
			n, err := server.WriteBatch(ds)
			require.NoError(t, err)
			require.Equal(t, len(ds), n)
			readBatch(t, steady, ds[:2], at(server))
			readBatch(t, mover, ds[2:], at(server))
			require.NoError(t, mover.Close())
			mover = pn.listenAt(t, away.String())
		}
	})
}

// One that nobody serves ends a batch there, and what is behind it may be written on its
// own.
func TestPacketBatchNobodyThere(t *testing.T) {
	set(t, &packetBounds.FailurePause, time.Hour)
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if !pn.overVerbs() {
			return // UDP tells a connected one only
		}
		p, server, gone := pn.listen(t), pn.listen(t), pn.listen(t)
		to := at(gone)
		require.NoError(t, gone.Close())
		ds := datagrams(3, 5, at(server))
		ds[2].Addr = to
		require.True(t, eventually(func() bool {
			_, err := p.WriteToUDPAddrPort(nil, to)
			return err != nil
		}))
		before := p.Stats()
		n, err := p.WriteBatch(ds)
		require.Equal(t, 2, n)
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.ErrorContains(t, err, to.String())
		n, err = p.WriteBatch(ds[3:])
		require.NoError(t, err)
		require.Equal(t, 2, n)
		readBatch(t, server, slices.Delete(ds, 2, 3), at(p))
		require.EqualValues(t, 4, p.Stats().DatagramsSent-before.DatagramsSent)
	})
}

// What a full send queue holds up notices its deadline, and Close; as many were sent as it
// says, of what was in the buffers then.
func TestPacketBatchQueueFull(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for _, stop := range []struct {
			call func() error
			err  error
		}{
			{func() error { return client.SetWriteDeadline(past) }, os.ErrDeadlineExceeded},
			{client.Close, net.ErrClosed},
		} {
			client.SetWriteDeadline(time.Time{})
			ds, before := datagrams(4, udconn.SendSlots+udconn.ChainLength, at(server)), client.Stats()
			pn.fabric.Stall(true)
			var n int
			var err error
			var batch, stopped sync.WaitGroup
			batch.Go(func() { n, err = client.WriteBatch(ds) })
			require.True(t, eventually(func() bool { return client.Stats().QueueStalls > before.QueueStalls }))
			stopped.Go(func() {
				if err := stop.call(); err != nil {
					t.Error(err)
				}
			})
			within(t, "WriteBatch", batch.Wait)
			for _, d := range ds {
				clear(d.Buf)
			}
			pn.fabric.Stall(false) // for which Close waits
			within(t, "what has stopped it", stopped.Wait)
			require.Equal(t, udconn.SendSlots, n)
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, stop.err)
			require.EqualValues(t, n, client.Stats().DatagramsSent-before.DatagramsSent)
			readBatch(t, server, datagrams(4, n, at(server)), at(client))
		}
	})
}

// posting is a device that says when something is posted to be sent.
type posting struct {
	ibv.Provider
	hook *func()
}

type postingID struct {
	ibv.ID
	hook *func()
}

type postingQP struct {
	ibv.QP
	hook *func()
}

func (p posting) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	id, err := p.Provider.BindUD(ctx, local)
	return postingID{id, p.hook}, err
}

func (i postingID) CreateQP(pd ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	qp, err := i.ID.CreateQP(pd, init)
	return postingQP{qp, i.hook}, err
}

func (q postingQP) PostSend(wrs []ibv.SendWR) (int, error) {
	(*q.hook)()
	return q.QP.PostSend(wrs)
}

// A long batch, of which nothing has to wait, lets others in: here Close.
func TestPacketLongBatchEnds(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		hook := func() {}
		_, server := pn.pair(t)
		pn.cfg.Provider = posting{pn.cfg.Provider, &hook}
		client := pn.dial(t, server.LocalAddr())
		pingPong(t, client, server)
		var wg sync.WaitGroup
		posts := 0
		hook = func() {
			if posts++; posts == 2 {
				wg.Go(func() { client.Close() })
			}
			time.Sleep(time.Millisecond)
		}
		n, err := client.WriteBatch(make([]Datagram, 500*udconn.ChainLength))
		wg.Wait()
		require.ErrorIs(t, err, net.ErrClosed)
		require.GreaterOrEqual(t, n, 2*udconn.ChainLength)
		require.Zero(t, n%udconn.ChainLength)
	})
}

// Calls of one and of many keep the order among each other, to a peer that has yet to be
// found, and to one that is known. Their memory is the caller's when they return.
func TestPacketBatchOrder(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		p, peer := pn.listen(t), pn.listen(t)
		for range 10 {
			for i := range byte(packetBounds.Waiting / 4) {
				b := [2]byte{3 * i, 3*i + 1}
				n, err := p.WriteBatch([]Datagram{{Buf: b[:1], Addr: at(peer)}, {Addr: at(peer)}, {Buf: b[1:], Addr: at(peer)}})
				require.NoError(t, err)
				require.Equal(t, 3, n)
				b = [2]byte{3*i + 2, 255}
				_, err = p.WriteToUDPAddrPort(b[:1], at(peer))
				require.NoError(t, err)
				b[0] = 255
			}
			for i := range byte(packetBounds.Waiting / 4) {
				for _, want := range [][]byte{{3 * i}, {}, {3*i + 1}, {3*i + 2}} {
					got, _ := readFrom(t, peer)
					require.Equal(t, want, got)
				}
			}
		}
	})
}

// Members of a group and others may be in one batch.
func TestGroupBatch(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		member := gn.member(t, gn.a, 0)
		sender, peer := gn.sender(t), gn.listen(t)
		group := netip.AddrPortFrom(gn.a, portOfConn(member))
		for range 3 {
			ds := datagrams(5, 9, at(peer))
			var cast, direct []Datagram
			for i := range ds {
				if i%4 == 1 {
					ds[i].Addr = group
					cast = append(cast, ds[i])
				} else {
					direct = append(direct, ds[i])
				}
			}
			n, err := sender.WriteBatch(ds)
			require.NoError(t, err)
			require.Equal(t, len(ds), n)
			for _, d := range direct {
				got, _ := readFrom(t, peer)
				require.Equal(t, d.Buf, got)
			}
			for _, d := range cast {
				got, _ := readFrom(t, member)
				require.Equal(t, d.Buf, got)
			}
		}
		require.Zero(t, sender.Stats().Unsent)
	})
}

// Batches cost no allocation.
func TestPacketBatchesWithoutGarbage(t *testing.T) {
	for _, pn := range packetNets(t) {
		client, server := pn.pair(t)
		const n = 40
		out, in := datagrams(1, n, addrPort(server.LocalAddr())), emptyDatagrams(n, 600)
		server.SetReadDeadline(time.Now().Add(patience))
		turn := func() {
			if _, err := client.WriteBatch(out); err != nil {
				t.Fatal(err)
			}
			for got := 0; got < n; {
				k, err := server.ReadBatch(in)
				if err != nil {
					t.Fatal(err)
				}
				got += k
			}
		}
		for range 20 {
			turn()
		}
		require.Zero(t, testing.AllocsPerRun(heavy(200), turn), pn.name)
	}
}
