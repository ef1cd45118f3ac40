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
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// fpdu frames a segment without a CRC.
func fpdu(h iwarpwire.Header, payload string) []byte {
	ulpdu := make([]byte, iwarpwire.UntaggedLen)
	ulpdu = append(ulpdu[:h.Put(ulpdu)], payload...)
	b := append(binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu))), ulpdu...)
	return append(b, make([]byte, iwarpwire.FPDULen(len(ulpdu))-len(b))...)
}

// TestFirstMessage has the first message come so early that siw overlooks it:
// before the connection is accepted. The peer says nothing more unless it is
// asked.
func TestFirstMessage(t *testing.T) {
	a := addr(t)
	if !strings.HasPrefix(os.Getenv(deviceEnv), "siw") {
		t.Skip("a matter of siw's")
	}
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
	b = make([]byte, iwarpwire.FPDULen(iwarpwire.UntaggedLen+iwarpwire.ReadReqLen))
	_, err = io.ReadFull(conn, b)
	require.NoError(t, err, "nothing is asked of the peer")
	var h iwarpwire.Header
	n, term := h.Parse(b[iwarpwire.LengthLen:])
	require.Nil(t, term)
	require.Equal(t, iwarpwire.ReadRequest, h.Op)
	var req iwarpwire.ReadReq
	require.Nil(t, req.Parse(b[iwarpwire.LengthLen+n:][:iwarpwire.ReadReqLen]))
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
	assert.Equal(t, "first", string(buf[:wcs[0].ByteLen]))
	_, err = qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled}})
	assert.NoError(t, err, "the queue has all its room")
}
