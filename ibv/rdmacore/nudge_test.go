//go:build linux && cgo

package rdmacore_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// fpdu frames a segment without a CRC.
func fpdu(h iwarpwire.Header, payload string) []byte {
	ulpdu := make([]byte, iwarpwire.UntaggedLen)
	ulpdu = append(ulpdu[:h.Put(ulpdu)], payload...)
	b := append(binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu))), ulpdu...)
	return append(b, make([]byte, iwarpwire.FPDULen(len(ulpdu))-len(b))...)
}

// readFPDU reads an FPDU, and returns its header and its payload.
func readFPDU(t *testing.T, r io.Reader) (h iwarpwire.Header, payload []byte) {
	t.Helper()
	b := make([]byte, iwarpwire.LengthLen)
	_, err := io.ReadFull(r, b)
	require.NoError(t, err, "length of an FPDU")
	length := int(binary.BigEndian.Uint16(b))
	b = make([]byte, iwarpwire.FPDULen(length)-iwarpwire.LengthLen)
	_, err = io.ReadFull(r, b)
	require.NoError(t, err, "FPDU of %d bytes", length)
	n, term := h.Parse(b[:length])
	require.Nil(t, term)
	return h, b[n:length]
}

// requireSIW skips the test where the RDMA device is another one than siw.
func requireSIW(t *testing.T) netip.Addr {
	t.Helper()
	a := addr(t)
	if !strings.HasPrefix(os.Getenv(deviceEnv), "siw") {
		t.Skip("a matter of siw's")
	}
	return a
}

// TestFirstMessage has the first message come so early that siw overlooks it:
// before the connection is accepted. The peer says nothing more unless it is
// asked.
func TestFirstMessage(t *testing.T) {
	a := requireSIW(t)
	p := open(t, rdmacore.Config{})
	ln, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	defer ln.Close()

	conn, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(verbstest.Patience))
	b, err := (&iwarpwire.Start{Rev: 1}).Append(nil)
	require.NoError(t, err)
	_, err = conn.Write(b)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	defer cancel()
	id, err := ln.Accept(ctx)
	require.NoError(t, err)
	_, err = conn.Write(fpdu(iwarpwire.Header{Op: iwarpwire.Send, QN: iwarpwire.QNSend, MSN: 1, Last: true}, "first"))
	require.NoError(t, err)
	defer id.Close()
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	defer pd.Close()
	cq, err := id.Device().CreateCQ(4)
	require.NoError(t, err)
	defer cq.Close()
	buf := make([]byte, 4096)
	mr, err := pd.RegMR(buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	defer mr.Close()
	qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxRecvSGE: 1}})
	require.NoError(t, err)
	defer qp.Close()
	_, err = qp.PostRecv([]ibv.RecvWR{{ID: 7, SGL: []ibv.SGE{{Buf: buf, LKey: mr.LKey()}}}})
	require.NoError(t, err)
	require.NoError(t, cq.Arm(false))
	require.NoError(t, id.Accept(ctx, ibv.ConnParam{InitiatorDepth: 1}))

	_, err = io.ReadFull(conn, make([]byte, iwarpwire.StartLen))
	require.NoError(t, err)
	h, payload := readFPDU(t, conn) // or nothing is asked of the peer
	require.Equal(t, iwarpwire.ReadRequest, h.Op)
	var req iwarpwire.ReadReq
	require.Nil(t, req.Parse(payload))
	assert.Zero(t, req.Size)
	_, err = conn.Write(fpdu(iwarpwire.Header{Tagged: true, Last: true, Op: iwarpwire.ReadResponse, STag: req.SinkSTag, TO: req.SinkTO}, ""))
	require.NoError(t, err)

	require.NoError(t, cq.Wait(time.Now().Add(verbstest.Patience)))
	var wcs [4]ibv.WC
	polled, err := cq.Poll(wcs[:])
	require.NoError(t, err)
	require.Equal(t, 1, polled, "and no completion of the question")
	assert.Equal(t, ibv.WCSuccess, wcs[0].Status)
	assert.Equal(t, uint64(7), wcs[0].ID)
	defect.Bytes(t, "first", buf[:wcs[0].ByteLen])
	_, err = qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled}})
	assert.NoError(t, err, "the queue has all its room")
}

// TestFirstMessageUnanswered has a peer that does not answer the first message, as if its device had
// overlooked it. RDMA Writes of no bytes come behind it until there is an answer.
func TestFirstMessageUnanswered(t *testing.T) {
	a := requireSIW(t)
	p := open(t, rdmacore.Config{})
	ln, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	defer cancel()
	id, err := p.Resolve(ctx, netip.AddrPort{}, ln.Addr().(*net.TCPAddr).AddrPort())
	require.NoError(t, err)
	defer id.Close()
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	defer pd.Close()
	cq, err := id.Device().CreateCQ(8)
	require.NoError(t, err)
	defer cq.Close()
	buf := make([]byte, 4096)
	mr, err := pd.RegMR(buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	defer mr.Close()
	qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
	require.NoError(t, err)
	defer qp.Close()
	_, err = qp.PostRecv([]ibv.RecvWR{{ID: 7, SGL: []ibv.SGE{{Buf: buf[:2048], LKey: mr.LKey()}}}})
	require.NoError(t, err)
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(ctx, ibv.ConnParam{}) }()

	conn, err := ln.Accept()
	require.NoError(t, err)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(verbstest.Patience))
	b := make([]byte, iwarpwire.StartLen)
	_, err = io.ReadFull(conn, b)
	require.NoError(t, err)
	private, err := iwarpwire.ParseStartHeader(b, false)
	require.NoError(t, err)
	b = append(b, make([]byte, private)...)
	_, err = io.ReadFull(conn, b[iwarpwire.StartLen:])
	require.NoError(t, err)
	request, err := iwarpwire.ParseStart(b, false)
	require.NoError(t, err)
	reply, err := (&iwarpwire.Start{Reply: true, Rev: request.Rev, Enhanced: request.Enhanced, IRD: request.ORD, ORD: request.IRD}).Append(nil)
	require.NoError(t, err)
	_, err = conn.Write(reply)
	require.NoError(t, err)
	require.NoError(t, <-connected)

	send := func(text string) {
		t.Helper()
		wr := ibv.SendWR{ID: 8, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: buf[2048:][:copy(buf[2048:], text)], LKey: mr.LKey()}}}
		_, err := qp.PostSend([]ibv.SendWR{wr})
		require.NoError(t, err)
	}
	poll := func() ibv.WC {
		t.Helper()
		var wcs [1]ibv.WC
		for {
			require.NoError(t, cq.Arm(false))
			n, err := cq.Poll(wcs[:])
			require.NoError(t, err)
			if n > 0 {
				require.Equal(t, ibv.WCSuccess, wcs[0].Status)
				return wcs[0]
			}
			require.NoError(t, cq.Wait(time.Now().Add(verbstest.Patience)))
		}
	}
	send("first")
	h, payload := readFPDU(t, conn)
	require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, QN: iwarpwire.QNSend, MSN: 1, Last: true}, h)
	require.Equal(t, "first", string(payload))
	require.Equal(t, uint64(8), poll().ID)
	nudge := iwarpwire.Header{Tagged: true, Op: iwarpwire.Write, Last: true}
	for range 3 {
		h, payload := readFPDU(t, conn)
		require.Equal(t, nudge, h)
		require.Empty(t, payload)
	}
	_, err = conn.Write(fpdu(iwarpwire.Header{Op: iwarpwire.Send, QN: iwarpwire.QNSend, MSN: 1, Last: true}, "answer"))
	require.NoError(t, err)
	wc := poll()
	require.Equal(t, uint64(7), wc.ID, "and no completion of the RDMA Writes")
	defect.Bytes(t, "answer", buf[:wc.ByteLen])

	send("second") // the queue has all its room
	for {
		h, payload := readFPDU(t, conn)
		if h == nudge { // it was on its way when the answer came
			continue
		}
		require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, QN: iwarpwire.QNSend, MSN: 2, Last: true}, h)
		require.Equal(t, "second", string(payload))
		break
	}
	require.Equal(t, uint64(8), poll().ID)
	require.NoError(t, id.Disconnect())
	rest, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Empty(t, rest, "no further RDMA Writes")
}
